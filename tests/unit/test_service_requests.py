"""What an operator's request comes to, and the exit codes of `gpuward service`."""

import http.server
import json
import socketserver
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from supervisor.api.unix import Peer
from supervisor.cli.app import app
from supervisor.service.requests import Act, Already, Decision, Refused, Seen, Verb, decide
from supervisor.service.states import ALIVE, State

runner = CliRunner()


def seen(state: State, **changed: Any) -> Seen:
    facts: dict[str, Any] = {
        "held": False,
        "ends": False,
        "has_process": state in ALIVE,
        "launched": True,
        "told_to_drain": True,
    }
    return Seen(**({"state": state, "why": "w", "no_start": ""} | facts | changed))


@pytest.mark.parametrize(
    ("verb", "found", "comes_to"),
    [
        (Verb.START, seen(State.STOPPED, held=True), Act.LAUNCH),
        (Verb.START, seen(State.STOPPED, held=True, launched=False, no_start="no term"), Act.RELEASE),
        (Verb.START, seen(State.STOPPED, launched=False, no_start="no term"), Refused("no term")),
        (Verb.START, seen(State.RUNNING, no_start="lost"), Refused("lost")),
        (Verb.START, seen(State.DEGRADED), Act.START_ANEW),
        (Verb.START, seen(State.BACKOFF), Act.GO_ON),
        (Verb.START, seen(State.RUNNING), Already("it is running already")),
        (Verb.START, seen(State.STOPPING), Refused("it is still being stopped: w")),
        (Verb.START, seen(State.QUARANTINED), Refused("it is quarantined: w")),
        (Verb.STOP, seen(State.RUNNING), Act.END),
        (Verb.STOP, seen(State.RUNNING, no_start="lost"), Act.END),
        (Verb.STOP, seen(State.STOPPING), Act.END),
        (Verb.STOP, seen(State.STOPPING, ends=True), Act.KILL),
        (Verb.STOP, seen(State.STOPPED), Act.HOLD),
        (Verb.STOP, seen(State.STOPPED, held=True), Already("it is stopped by an operator already")),
        (Verb.STOP, seen(State.DEGRADED, launched=False, no_start="no term"), Refused("no term")),
        (Verb.RESTART, seen(State.RUNNING), Act.AGAIN),
        (Verb.RESTART, seen(State.STOPPED), Act.LAUNCH),
        (Verb.RESTART, seen(State.STARTING, has_process=False), Already("it is starting already")),
        (Verb.RESTART, seen(State.RUNNING, ends=True), Refused("it is still being stopped: w")),
        (Verb.DRAIN, seen(State.RUNNING), Act.DRAIN),
        (Verb.DRAIN, seen(State.UNREADY), Act.DRAIN),
        (Verb.DRAIN, seen(State.RUNNING, told_to_drain=False), Act.DRAIN_UNTOLD),
        (Verb.DRAIN, seen(State.DRAINING), Already("it drains already")),
        (Verb.DRAIN, seen(State.RUNNING, ends=True), Refused("it is running, and only what runs can drain: w")),
        (Verb.DRAIN, seen(State.BACKOFF), Refused("it is backoff, and only what runs can drain: w")),
        (Verb.START, seen(State.DRAINING), Refused("it drains: restart it, or start it once it has ended")),
        (Verb.STOP, seen(State.DRAINING), Act.END),
        (Verb.RESTART, seen(State.DRAINING), Act.AGAIN),
        (Verb.RESET, seen(State.DEGRADED, launched=False, no_start="no term"), Act.RESET),
    ],
)
def test_a_request_comes_to_what_the_state_allows(verb: Verb, found: Seen, comes_to: Decision) -> None:
    assert decide(verb, found) == comes_to


@pytest.mark.parametrize("groups", [frozenset({5}), frozenset({5, 7})])
def test_only_root_and_members_of_the_admin_group_may_command(groups: frozenset[int]) -> None:
    assert Peer(0, frozenset()).may_command(None)
    assert not Peer(4999, groups).may_command(None)
    assert Peer(4999, groups).may_command(7) == (7 in groups)


class _Handler(http.server.BaseHTTPRequestHandler):
    status, body = 200, b"{}"

    def do_GET(self) -> None:
        self.send_response(self.status)
        self.send_header("Content-Length", str(len(self.body)))
        self.end_headers()
        self.wfile.write(self.body)

    do_POST = do_GET  # noqa: N815 - the name is http.server's

    def address_string(self) -> str:
        return "unix"

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[type[_Handler]]:
    class Handler(_Handler):
        pass

    with socketserver.ThreadingUnixStreamServer(str(tmp_path / "api.sock"), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield Handler
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(("status", "code"), [(403, 77), (404, 4), (409, 75), (503, 69), (500, 1)])
def test_a_refusal_is_one_line_and_an_exit_code(daemon: type[_Handler], tmp_path: Path, status: int, code: int) -> None:
    daemon.status, daemon.body = status, json.dumps({"error": "because\x1b[2J"}).encode()
    done = runner.invoke(app, ["service", "stop", "one", "--run-dir", str(tmp_path)])
    assert (done.exit_code, done.stdout, done.stderr) == (code, "", "gpuward: because�[2J\n")


@pytest.mark.parametrize(("state", "code"), [("running", 0), ("degraded", 3), ("stopped", 3), ("starting", 3)])
def test_show_exits_3_where_it_is_not_running(daemon: type[_Handler], tmp_path: Path, state: str, code: int) -> None:
    daemon.body = json.dumps({"service": {"name": "one", "state": state, "why": "w", "for_s": 1}}).encode()
    done = runner.invoke(app, ["service", "show", "one", "--run-dir", str(tmp_path)])
    assert (done.exit_code, f"one: {state} for 1 s: w" in done.stdout) == (code, True)


@pytest.mark.parametrize("body", [b"no json", b"[]"])
def test_what_is_not_gpuward_is_no_daemon(daemon: type[_Handler], tmp_path: Path, body: bytes) -> None:
    daemon.body = body
    assert runner.invoke(app, ["service", "list", "--run-dir", str(tmp_path)]).exit_code == 69


def test_no_daemon_is_exit_69_and_names_the_socket(tmp_path: Path) -> None:
    done = runner.invoke(app, ["service", "list", "--run-dir", str(tmp_path)])
    assert (done.exit_code, done.stderr) == (
        69,
        f"gpuward: no daemon answers at {tmp_path}/api.sock: No such file or directory\n",
    )
