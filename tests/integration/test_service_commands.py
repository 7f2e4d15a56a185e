"""An operator's commands for one service of a whole node: `gpuward service` and the HTTP behind it."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from supervisor.api.unix import API_SOCKET
from supervisor.cli.local import _Connection
from tests.bed.keeper import PATIENCE
from tests.bed.nodes import LONG_TTL, Make, NodeBed, gone

SLEEPER = ("sleep", "1000")
LIFETIME = {"gpu": 0, "lock": "lifetime", "gpu_fd": "optional"}
FAILS_FAST = {"restart": {"window": "5m", "backoff": ["50ms"], "healthy": "10m"}}
NOBODY = 65534
ADMINS = 54321
"""A gid that nobody has."""


def gpuward(node: NodeBed, *words: str) -> "subprocess.CompletedProcess[str]":
    """`gpuward service …` with the node's run folder."""
    command = [sys.executable, "-m", "supervisor.entry", "service", *words, "--run-dir", str(node.run)]
    return subprocess.run(command, capture_output=True, text=True, timeout=2 * PATIENCE, check=False)


def ask(node: NodeBed, method: str, path: str, body: bytes | None = None) -> tuple[int, dict[str, Any]]:
    """Through the unix socket."""
    connection = _Connection(node.run / API_SOCKET)
    with contextlib.closing(connection):
        connection.request(method, path, body=body)
        with connection.getresponse() as response:
            return response.status, json.loads(response.read())


def post(node: NodeBed, name: str, verb: str) -> dict[str, Any]:
    """Its row after a request that is carried out."""
    code, answer = ask(node, "POST", f"/services/{name}/{verb}")
    assert code == 202, answer
    row: dict[str, Any] = answer["service"]
    return row


def row(node: NodeBed, name: str) -> dict[str, Any]:
    found: dict[str, Any] = ask(node, "GET", f"/services/{name}")[1]["service"]
    return found


def in_state(node: NodeBed, name: str, state: str, within: float = PATIENCE) -> dict[str, Any]:
    return node.until(lambda: found if (found := row(node, name))["state"] == state else None, within)


def deaf(node: NodeBed, name: str, **keys: Any) -> Path:
    """A service that ignores SIGTERM; the file that it makes once it does."""
    flag = node.folder / f"{name}-is-deaf"
    script = f'trap "" TERM; touch {flag}; while :; do sleep 0.05; done'
    node.add_service(name, "sh", "-c", script, **({"stop_timeout": "60s"} | keys))
    return flag


def test_a_degraded_service_runs_again_after_a_reset_and_its_failures_are_forgotten(make_node: Make) -> None:
    node = make_node(ttl=LONG_TTL).after_an_orderly_end()
    healed = node.folder / "healed"
    node.add_service("broken", "sh", "-c", f"[ -e {healed} ] && exec sleep 1000; exit 3", **FAILS_FAST)
    node.start().until(node.leads)
    assert in_state(node, "broken", "degraded")["failures"] == 3
    shown = gpuward(node, "show", "broken")
    assert shown.returncode == 3
    assert "degraded" in shown.stdout
    healed.touch()
    assert gpuward(node, "reset", "broken").returncode == 0
    assert in_state(node, "broken", "running")["failures"] == 0
    assert gpuward(node, "show", "broken").returncode == 0


def test_start_gets_a_degraded_service_going_and_restart_one_in_its_pause(make_node: Make) -> None:
    node = make_node(ttl=LONG_TTL).after_an_orderly_end()
    script = 'echo x >> starts; [ "$(wc -l < starts)" -ge {} ] && exec sleep 1000; exit 3'
    for name, good_from, backoff in (("degrades", 4, ["50ms"]), ("pauses", 3, ["10m"])):
        folder = node.folder / name
        folder.mkdir()
        node.add_service(
            name,
            "sh",
            "-c",
            script.format(good_from),
            cwd=str(folder),
            restart=FAILS_FAST["restart"] | {"backoff": backoff},
        )
    node.start().until(node.leads)
    in_state(node, "degrades", "degraded")
    in_state(node, "pauses", "backoff")
    started = gpuward(node, "start", "degrades", "--wait")
    assert (started.returncode, "running" in started.stdout) == (0, True)
    assert gpuward(node, "restart", "pauses", "--wait").returncode == 0
    assert row(node, "pauses")["failures"] == 2  # the operator's word ends the pause, and is no excuse


def test_a_stop_frees_the_lifetime_lock_and_the_next_in_line_gets_it(make_node: Make) -> None:
    node = make_node(ttl=LONG_TTL).after_an_orderly_end()
    node.add_service("first", *SLEEPER, priority=1, **LIFETIME)
    node.add_service("second", *SLEEPER, **LIFETIME)
    node.start().until(node.leads)
    in_state(node, "first", "running")
    in_state(node, "second", "waiting-lock")
    post(node, "first", "stop")
    pid = node.until(lambda: row(node, "second")["pid"])
    assert row(node, "first")["why"] == "stopped by an operator"
    assert row(node, "first")["lock"] == "free"
    assert not gone(pid)
    assert (node.status() or {})["gpus"][0]["lock"]["holder"]["service"] == "second"
    again = gpuward(node, "start", "first")
    assert again.returncode == 0
    in_state(node, "first", "waiting-lock")
    assert row(node, "second")["pid"] == pid


def test_a_stopped_service_stays_so_over_a_change_of_terms_until_it_is_started(make_node: Make) -> None:
    node = make_node()
    for name in ("one", "two"):
        node.add_service(name, *SLEEPER)
    first = node.start().until_leading()
    stopped = gpuward(node, "stop", "one", "--wait", "--format", "json")
    assert stopped.returncode == 0
    assert json.loads(stopped.stdout)["service"]["state"] == "stopped"
    assert json.loads(gpuward(node, "stop", "one", "--format", "json").stdout)["changed"] is False
    node.lose_the_lock()
    node.until(lambda: gone(first["services"][1]["pid"]))
    node.until(lambda: node.leads() and row(node, "two")["state"] == "running")
    assert (node.status() or {})["term"]["token"] > first["term"]["token"]
    assert (row(node, "one")["state"], row(node, "one")["why"]) == ("stopped", "stopped by an operator")
    started = gpuward(node, "start", "one", "--wait")
    assert (started.returncode, "running" in started.stdout) == (0, True)
    noop = ask(node, "POST", "/services/one/start")
    assert (noop[0], noop[1]["changed"], noop[1]["message"]) == (202, False, "one: it is running already")


def test_restarts_by_an_operator_count_as_no_failure(make_node: Make) -> None:
    node = make_node(ttl=LONG_TTL).after_an_orderly_end()
    node.add_service("one", *SLEEPER)
    pid = node.start().until_leading()["services"][0]["pid"]
    for _ in range(3):
        assert gpuward(node, "restart", "one", "--wait").returncode == 0
        found = row(node, "one")
        assert (found["state"], found["failures"], found["pid"] != pid) == ("running", 0, True)
        assert gone(pid)
        pid = found["pid"]
    assert found["restarts"] == 3


def test_a_second_stop_kills_a_service_that_ignores_the_first(make_node: Make) -> None:
    node = make_node(ttl=LONG_TTL).after_an_orderly_end()
    flag = deaf(node, "stubborn")
    node.start().until_leading()
    node.until(flag.exists)
    pid = row(node, "stubborn")["pid"]
    assert post(node, "stubborn", "stop")["state"] == "stopping"
    assert ask(node, "POST", "/services/stubborn/start")[0] == 409
    hasty = gpuward(node, "stop", "stubborn", "--wait", "--timeout", "0.3")  # this is the second one
    in_state(node, "stubborn", "stopped")
    assert gone(pid)
    assert "killed" in hasty.stdout


def test_one_stop_alone_waits_for_stop_timeout_and_wait_says_that_it_goes_on(make_node: Make) -> None:
    node = make_node(ttl=LONG_TTL).after_an_orderly_end()
    flag = deaf(node, "stubborn", stop_timeout="8s")
    node.start().until_leading()
    node.until(flag.exists)
    began = time.monotonic()
    impatient = gpuward(node, "stop", "stubborn", "--wait", "--timeout", "0.5")
    assert (impatient.returncode, "it goes on" in impatient.stderr) == (1, True)
    assert row(node, "stubborn")["state"] == "stopping"
    in_state(node, "stubborn", "stopped")
    assert time.monotonic() - began >= 8


def test_a_stop_during_a_restart_wins(make_node: Make) -> None:
    node = make_node(ttl=LONG_TTL).after_an_orderly_end()
    flag = deaf(node, "stubborn", stop_timeout="1s")
    node.start().until_leading()
    node.until(flag.exists)
    assert post(node, "stubborn", "restart")["state"] == "stopping"
    post(node, "stubborn", "stop")
    assert in_state(node, "stubborn", "stopped")["why"] == "stopped by an operator"
    assert node.service_pids() == []


def test_commands_and_logs_over_tcp_are_403_and_reads_are_not(make_node: Make) -> None:
    node = make_node(ttl=LONG_TTL).after_an_orderly_end()
    node.add_service("one", *SLEEPER)
    pid = node.start().until_leading()["services"][0]["pid"]
    request = urllib.request.Request(f"{node.url}/services/one/stop", method="POST")
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=PATIENCE)
    with refused.value as answer:
        assert answer.code == 403
        assert "gpuward service" in json.loads(answer.read())["error"]
    assert node.get("/services/one/logs")[0] == 403
    assert node.get("/services/one")[1]["service"]["pid"] == pid
    assert [found["name"] for found in node.get("/services")[1]["services"]] == ["one"]
    assert node.get("/services/two")[0] == 404
    assert row(node, "one")["state"] == "running"


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """Unlike tmp_path, other users may enter it."""
    with tempfile.TemporaryDirectory(prefix="gpuward-test-") as name:
        os.chmod(name, 0o755)
        yield Path(name)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_only_root_and_the_admin_group_may_command(open_folder: Path, make_node: Make) -> None:
    node = make_node(folder=str(open_folder / "n1"), ttl=LONG_TTL).after_an_orderly_end()
    node.config["admin_group"] = ADMINS
    node.add_service("one", *SLEEPER)
    node.start().until_leading()
    path = node.run / API_SOCKET
    assert (path.stat().st_mode & 0o777, path.stat().st_gid) == (0o660, ADMINS)

    def as_nobody(*groups: str) -> "subprocess.CompletedProcess[str]":
        words = ["setpriv", f"--reuid={NOBODY}", *groups, sys.executable, "-m", "supervisor.entry"]
        command = [*words, "service", "restart", "one", "--run-dir", str(node.run)]
        return subprocess.run(command, capture_output=True, text=True, timeout=2 * PATIENCE, check=False)

    stranger = (f"--regid={NOBODY}", "--clear-groups")
    probe = ["setpriv", f"--reuid={NOBODY}", *stranger, sys.executable, "-c", "import supervisor.cli.service"]
    if subprocess.run(probe, stderr=subprocess.DEVNULL, check=False).returncode:
        pytest.skip("needs a virtual environment that any user may execute")
    refused = as_nobody(*stranger)
    assert (refused.returncode, "not allowed" in refused.stderr) == (77, True)
    path.chmod(0o666)  # as if its mode were wrong: the peer is looked at all the same
    refused = as_nobody(*stranger)
    assert (refused.returncode, f"uid {NOBODY} may not" in refused.stderr) == (77, True)
    assert row(node, "one")["restarts"] == 0
    path.chmod(0o660)
    for member in ((f"--regid={NOBODY}", f"--groups={ADMINS}"), (f"--regid={ADMINS}", "--clear-groups")):
        allowed = as_nobody(*member)
        assert (allowed.returncode, allowed.stderr) == (0, "")
        in_state(node, "one", "running")
    assert row(node, "one")["restarts"] == 2


def test_a_service_that_is_not_configured_is_404_and_exit_4(make_node: Make) -> None:
    node = make_node(ttl=LONG_TTL).after_an_orderly_end()
    node.start().until(node.status)
    assert ask(node, "GET", "/services/ghost")[0] == 404
    assert ask(node, "POST", "/services/ghost/stop")[0] == 404
    assert ask(node, "POST", "/services/..%2fghost/stop")[0] == 404
    for words in (("show",), ("start",), ("stop",), ("restart",), ("reset",), ("logs",)):
        done = gpuward(node, *words, "ghost")
        assert (done.returncode, done.stderr.count("\n")) == (4, 1)


def test_without_a_term_nothing_is_started_or_stopped_and_the_reason_is_said(make_node: Make) -> None:
    node = make_node(ttl=LONG_TTL)  # for so long it waits before it claims
    node.add_service("one", *SLEEPER)
    node.start().until(lambda: (found := node.status()) and found["role"] == "standby")
    for verb in ("start", "stop", "restart"):
        code, answer = ask(node, "POST", f"/services/one/{verb}")
        assert (code, f"one cannot {verb} now: n1 does not lead" in answer["error"]) == (409, True)
        assert gpuward(node, verb, "one").returncode == 75
    assert node.service_pids() == []
    assert gpuward(node, "list").returncode == 0


def test_a_request_with_a_body_or_a_wrong_parameter_is_refused(make_node: Make) -> None:
    node = make_node(ttl=LONG_TTL).after_an_orderly_end()
    node.add_service("one", *SLEEPER)
    node.start().until_leading()
    assert ask(node, "POST", "/services/one/stop", b"now")[0] == 400
    assert ask(node, "GET", "/services/one/logs?lines=513")[0] == 400
    assert ask(node, "GET", "/services/one/logs?lines=0")[0] == 400
    assert ask(node, "GET", "/services/one/logs?after=../x")[0] == 400
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(PATIENCE)
        connection.connect(str(node.run / API_SOCKET))
        connection.sendall(b"POST /services/one/stop HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n")
        assert b" 408 " in connection.recv(1000)
    assert row(node, "one")["state"] == "running"


def test_logs_of_200_kb_lines_and_latin_1_come_bounded_and_replaced(make_node: Make) -> None:
    node = make_node(ttl=LONG_TTL).after_an_orderly_end()
    node.add_service("one", *SLEEPER)
    node.start().until_leading()
    log = node.folder / "log" / "one.log"
    huge = b"\xe4" * 200_000
    log.write_bytes(b"".join(b"%d " % number + huge + b"\n" for number in range(250)) + b"caf\xe9\r\nunfinished")
    code, answer = ask(node, "GET", "/services/one/logs?lines=4")
    assert code == 200
    assert [line[:5] for line in answer["lines"]] == ["248 �", "249 �", "caf�"]
    assert (len(answer["lines"][0]), answer["unfinished"], answer["cut"]) == (200_004, "unfinished", False)
    code, answer = ask(node, "GET", "/services/one/logs?lines=512")
    assert (answer["cut"], 5 < len(answer["lines"]) < 15) == (True, True)
    assert gpuward(node, "logs", "one", "-n", "2").stdout == "caf�\nunfinished\n"


def test_logs_follow_what_comes_also_in_a_new_file_until_ctrl_c(make_node: Make) -> None:
    node = make_node(ttl=LONG_TTL).after_an_orderly_end()
    node.add_service("one", *SLEEPER)
    node.start().until_leading()
    log = node.folder / "log" / "one.log"
    log.write_text("old\nbegun")
    command = [sys.executable, "-m", "supervisor.entry", "service", "logs", "one", "-f", "--run-dir", str(node.run)]
    seen: list[str] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as follower:
        assert follower.stdout is not None
        reader = threading.Thread(target=lambda: seen.extend(iter(follower.stdout.readline, "")))  # type: ignore[union-attr]
        reader.start()
        try:
            node.until(lambda: seen == ["old\n"])
            with log.open("a") as file:
                file.write(" and done\nnext\n")
            node.until(lambda: seen[1:] == ["begun and done\n", "next\n"])
            log.rename(log.with_suffix(".1"))
            log.write_text("rotated\n")
            node.until(lambda: seen[3:] == ["rotated\n"])
            follower.send_signal(signal.SIGINT)
            assert follower.wait(PATIENCE) == 0
        finally:
            follower.kill()
            reader.join()


def test_a_log_that_is_a_link_or_a_fifo_is_not_read(make_node: Make) -> None:
    node = make_node(ttl=LONG_TTL).after_an_orderly_end()
    node.add_service("one", *SLEEPER)
    node.start().until_leading()
    log = node.folder / "log" / "one.log"
    log.unlink()
    log.symlink_to("/etc/passwd")
    assert ask(node, "GET", "/services/one/logs")[0] == 503
    log.unlink()
    os.mkfifo(log)
    assert ask(node, "GET", "/services/one/logs")[0] == 503
    log.unlink()
    assert ask(node, "GET", "/services/one/logs")[1]["lines"] == []


def test_no_answer_shows_a_command_line_or_an_environment(make_node: Make) -> None:
    node = make_node(ttl=LONG_TTL).after_an_orderly_end()
    node.add_service("one", "sh", "-c", "exec sleep 1000 # hush-argument", env={"TOKEN": "hush-variable"})
    node.add_service("bad", "/no/such/hush-program", "hush-argument", env={"TOKEN": "hush-variable"}, **FAILS_FAST)
    node.start().until(node.leads)
    in_state(node, "bad", "degraded")
    answers = [ask(node, "GET", path) for path in ("/services", "/services/one", "/services/bad")]
    answers += [
        ask(node, "POST", f"/services/{name}/{verb}") for name in ("one", "bad") for verb in ("restart", "reset")
    ]
    answers += [node.get("/status"), node.get("/services")]
    assert "hush" not in json.dumps(answers)


def test_the_socket_of_a_dead_supervisor_is_replaced_and_anything_else_there_is_refused(make_node: Make) -> None:
    node = make_node(ttl=LONG_TTL).after_an_orderly_end()
    node.start().until(node.status)
    node.kill()
    path = node.run / API_SOCKET
    stale = path.stat().st_ino
    assert gpuward(node, "list").returncode == 69
    node.start().until(node.status)
    assert path.stat().st_ino != stale
    assert path.stat().st_mode & 0o777 == 0o600  # no admin_group: root only
    assert gpuward(node, "list").returncode == 0
    node.signal(signal.SIGTERM)
    assert node.exit_code() == 0
    assert not path.exists()
    (node.folder / "elsewhere").write_text("kept")
    path.symlink_to(node.folder / "elsewhere")
    node.start()
    assert node.exit_code() == 1
    assert f"{path} is not a socket" in node.output()
    assert (node.folder / "elsewhere").read_text() == "kept"
