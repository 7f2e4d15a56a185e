import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from supervisor.cli import status as status_module
from supervisor.cli.app import app
from supervisor.cli.output import plain, span
from tests.unit.config_samples import SMALL, write

runner = CliRunner()
LEADING: dict[str, Any] = {
    "version": "0.1.0",
    "cluster": "prod",
    "node": "gpu1",
    "role": "leader",
    "state": "active",
    "why": "holds the lease",
    "unfit_because": [],
    "ttl_s": 90,
    "term": {"token": 7, "instance": "i", "since": "2026-01-01T00:00:00Z", "lease_left_s": 71.5},
    "leader": {"node": "gpu1", "token": 7, "state": "active", "seen_s_ago": 2.0},
    "containment": "cgroup",
    "keeper": {"pid": 41, "rss_bytes": 1, "memory_locked": False},
    "gpus": [
        {
            "index": 0,
            "uuid": "GPU-0",
            "device": "/dev/x",
            "state": "healthy",
            "lock": {
                "path": "/run/gpu-0.lock",
                "holder": {"service": "trainer", "pid": 4242, "since": 1.0, "token": 7, "held_s": 8.0},
            },
        }
    ],
    "services": [
        {"name": "trainer", "state": "running", "why": "ready", "for_s": 3725, "pid": 4242, "restarts": 1, "gpu": 0},
        {"name": "[red]web", "state": "backoff", "why": "exit 1\x1b[2J", "for_s": 2, "pid": None, "next_s": 28.4},
    ],
    "events": [{"at": f"t{n}", "what": f"event {n}"} for n in range(12)],
    "alarms": [{"at": "t", "kind": "record", "text": "a corrupt record"}],
}
STANDBY = {
    **LEADING,
    "node": "gpu2",
    "role": "standby",
    "state": None,
    "term": None,
    "why": "gpu1 leads",
    "keeper": None,
}


@contextmanager
def answering(body: bytes, code: int = 200) -> Iterator[str]:
    """A server on loopback that says this to every GET."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(code if self.path == "/status" else 404)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def shown(answer: dict[str, Any]) -> str:
    with answering(json.dumps(answer).encode()) as url:
        result = runner.invoke(app, ["status", "--url", url])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_first_line_says_who_leads_with_which_token_and_for_how_long() -> None:
    assert shown(LEADING).splitlines()[0] == "prod: gpu1 leads, token 7, lease left 1 min 11 s of 1 min 30 s"
    assert shown(STANDBY).splitlines()[0] == "prod: gpu1 leads, token 7, active, seen 2 s ago"
    assert shown({**STANDBY, "leader": None}).splitlines()[0] == "prod: no leader"


def test_a_leader_that_was_seen_more_than_a_ttl_ago_is_not_said_to_lead() -> None:
    silent = {**STANDBY, "leader": {**STANDBY["leader"], "seen_s_ago": 91.0}}
    line = shown(silent).splitlines()[0]
    assert line.startswith("prod: who leads is not known, the store has not answered for 1 min 31 s; gpu1 led then")


def test_the_node_its_gpus_and_services_are_shown() -> None:
    output = shown(LEADING)
    assert "this node gpu1: leader (active): holds the lease" in output
    assert "keeper pid 41, containment cgroup" in output
    rows = [line.split() for line in output.splitlines()]
    assert ["0", "healthy", "trainer", "4242", "8", "s", "/run/gpu-0.lock"] in rows
    assert ["trainer", "running", "1", "h", "2", "min", "4242", "1", "0", "ready"] in rows
    assert "next in 28 s" in output
    assert "a corrupt record" in output
    assert "event 11" in output
    assert "event 1\n" not in output


def test_an_unfit_node_says_why() -> None:
    unfit = {**STANDBY, "role": "unfit", "unfit_because": ["the GPU is lost"]}
    assert "unfit: the GPU is lost" in shown(unfit)


def test_what_others_wrote_cannot_steer_the_terminal() -> None:
    output = shown(LEADING)
    assert "\x1b" not in output
    assert "[red]web" in output


def test_an_answer_of_another_version_with_keys_missing_is_still_shown() -> None:
    assert "this node –: standby" in shown({"role": "standby", "gpus": [{}], "services": [{}], "events": [{}]})


def test_json_is_the_answer_itself() -> None:
    with answering(json.dumps(LEADING).encode()) as url:
        result = runner.invoke(app, ["status", "--url", url + "/", "--format", "json"])
    assert json.loads(result.stdout) == LEADING


def test_the_address_comes_from_the_configuration(tmp_path: Path) -> None:
    with answering(json.dumps(STANDBY).encode()) as url:
        path = write(tmp_path, SMALL + f"api: {{listen: '{url.removeprefix('http://')}'}}\n")
        assert "standby" in runner.invoke(app, ["status", "--config", str(path)]).stdout


@pytest.mark.parametrize(
    ("body", "code"), [(b"{}", 200), (b"[1]", 200), (b"<html>", 200), (b"[" * 90000, 200), (b"\xff", 200), (b"no", 404)]
)
def test_an_answer_of_something_else_is_no_daemon(body: bytes, code: int) -> None:
    with answering(body, code) as url:
        result = runner.invoke(app, ["status", "--url", url])
    assert result.exit_code == 69
    assert result.stderr.startswith(f"gpuward: no daemon answers at {url}: ")
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("url", ["ftp://x", "gpu1", "http://u:p@h:1", "http://h:99999", "", "http://127.0.0.1:1"])
def test_an_address_that_nothing_answers_at_is_one_line_and_69(url: str, tmp_path: Path) -> None:
    path = write(tmp_path, SMALL + "api: {listen: '127.0.0.1:1'}\n")
    result = runner.invoke(app, ["status", "--config", str(path), "--url", url])
    assert result.exit_code == 69
    assert len(result.stderr.splitlines()) == 1


def test_a_daemon_that_hangs_is_given_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_module, "TIMEOUT", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        result = runner.invoke(app, ["status", "--url", f"http://127.0.0.1:{server.getsockname()[1]}"])
    assert result.exit_code == 69
    assert "no answer within 0.1 s" in result.stderr


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.34, "340 ms"),
        (12.9, "12 s"),
        (303, "5 min 3 s"),
        (7800, "2 h 10 min"),
        (3600, "1 h"),
        (273600, "3 d 4 h"),
        (None, "–"),
    ],
)
def test_durations_are_shown_for_people(seconds: float | None, text: str) -> None:
    assert span(seconds) == text


def test_control_characters_are_replaced() -> None:
    assert plain("a\x1b[2J\nb") == "a�[2J�b"
