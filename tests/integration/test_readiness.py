"""When is a service ready, and what does it say of itself (sd_notify)? Real services, real sockets."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from supervisor.watchdog.round import TERM_WAIT
from tests.bed.nodes import LONG_TTL, Make, NodeBed, free_port, gone

ROOT = Path(__file__).parents[2]
SAYS = "import sys, time; sys.path.insert(0, {root!r}); from supervisor.notify import *; {script}"
SERVER = """
import http.server, json, sys, time
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps({"data": [{"id": open(sys.argv[2]).read()}]}).encode()
        self.send_response(200 if self.path == "/v1/models" else 404)
        self.end_headers()
        self.wfile.write(body)
time.sleep(0.5)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def says(script: str) -> tuple[str, ...]:
    """A service in Python that uses the helper."""
    return sys.executable, "-c", SAYS.format(root=str(ROOT), script=script)


def row(node: NodeBed, name: str = "one") -> dict[str, Any]:
    found = [one for one in (node.status() or {"services": []})["services"] if one["name"] == name]
    return found[0] if found else {"state": None, "pid": None, "why": "", "restarts": 0}


def leads(node: NodeBed) -> NodeBed:
    node.config["election"]["ttl"] = LONG_TTL
    node.after_an_orderly_end().start().until(node.leads)
    return node


# --- ready


def test_a_service_is_ready_when_it_says_so_and_not_before(make_node: Make) -> None:
    node = make_node()
    go = node.folder / "go"
    wait = f"import os\nwhile not os.path.exists({str(go)!r}): time.sleep(0.02)\nready('loaded'); time.sleep(1000)"
    node.add_service("one", *says(f"exec({wait!r})"), readiness={"notify": True})
    leads(node)
    time.sleep(0.5)  # longer than `ready_after`, which counts no longer
    assert row(node)["state"] == "starting"
    go.touch()
    node.until(lambda: row(node)["state"] == "running")
    assert row(node)["why"] == "it said READY=1"
    assert row(node)["status"] == "loaded"


def test_what_another_process_says_counts_for_nobody(make_node: Make) -> None:
    """The sender's cgroup names the service, not the message."""
    node = make_node()
    node.add_service("one", "sleep", "1000", readiness={"notify": True})
    leads(node)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
        for _ in range(100):
            stranger.sendto(b"READY=1\nX_GPU_SECTION=begin", str(node.run / "notify.sock"))
    time.sleep(0.3)
    assert row(node)["state"] == "starting"


def test_a_service_that_is_not_ready_in_time_has_failed_and_one_that_asks_for_more_time_gets_it(
    make_node: Make,
) -> None:
    node = make_node()
    go, late = node.folder / "go", {"restart": {"backoff": ["1h"]}}
    node.add_service("never", "sleep", "1000", readiness={"notify": True, "timeout": "6s"}, **late)
    more = (
        "import os\nnotify('EXTEND_TIMEOUT_USEC=600000000')\n"
        f"while not os.path.exists({str(go)!r}): time.sleep(0.02)\nready(); time.sleep(1000)"
    )
    node.add_service("more", *says(f"exec({more!r})"), readiness={"notify": True, "timeout": "5s"}, **late)
    leads(node)
    node.until(lambda: row(node, "never")["state"] == "backoff")
    assert "not ready within 6 s" in row(node, "never")["why"]
    assert row(node, "more")["state"] == "starting"
    go.touch()
    node.until(lambda: row(node, "more")["state"] == "running")
    assert row(node, "more")["restarts"] == 0


def test_a_service_is_ready_once_its_port_accepts_connections(make_node: Make) -> None:
    node = make_node()
    port, go = free_port(), node.folder / "go"
    script = (
        f"import os, socket\nwhile not os.path.exists({str(go)!r}): time.sleep(0.02)\n"
        f"s = socket.create_server(('127.0.0.1', {port})); time.sleep(1000)"
    )
    node.add_service("one", *says(f"exec({script!r})"), readiness={"tcp": f"127.0.0.1:{port}"})
    leads(node)
    node.until(lambda: row(node)["why"].startswith("not ready: "))
    go.touch()
    node.until(lambda: row(node)["state"] == "running")


def test_a_model_that_is_no_longer_served_makes_its_service_unready_and_kills_nothing(make_node: Make) -> None:
    node = make_node()
    port, model = free_port(), node.folder / "model"
    model.write_text("llama")
    http = {"http": f"http://127.0.0.1:{port}/v1/models", "model": "llama"}
    node.add_service("one", sys.executable, "-c", SERVER, str(port), str(model), readiness=http)
    leads(node)
    node.until(lambda: row(node)["state"] == "running")
    pid = row(node)["pid"]
    model.write_text("other")
    node.until(lambda: row(node)["state"] == "unready")
    assert "model llama is not served, but other" in row(node)["why"]
    assert node.get("/health")[0] == 503
    model.write_text("llama")
    node.until(lambda: row(node)["state"] == "running")
    assert row(node)["pid"] == pid


@pytest.mark.parametrize("killed", ["supervisor", "keeper", "both"])
def test_what_a_service_said_once_is_known_after_its_adoption(make_node: Make, killed: str) -> None:
    node = make_node()
    node.add_service("one", *says("ready(); time.sleep(1000)"), readiness={"notify": True})
    leads(node)
    node.until(lambda: row(node)["state"] == "running")
    pid, keeper = row(node)["pid"], node.keeper()
    if killed != "supervisor":
        os.kill(keeper, signal.SIGKILL)
    if killed != "keeper":
        node.kill()
        node.start()
    node.until(lambda: node.leads() and row(node)["state"] == "running" and (killed == "supervisor" or gone(keeper)))
    assert row(node)["pid"] == pid


# --- after


def test_a_service_starts_after_others_are_ready_and_delays_no_take_over(make_node: Make) -> None:
    node = make_node()
    go = node.folder / "go"
    node.add_service("last", "sleep", "1000", after=["one", "first"])
    node.add_service("first", "sleep", "1000")
    wait = f"import os\nwhile not os.path.exists({str(go)!r}): time.sleep(0.02)\nready(); time.sleep(1000)"
    node.add_service("one", *says(f"exec({wait!r})"), readiness={"notify": True})
    leads(node)
    node.until(lambda: row(node, "last")["why"] == "after one (starting)")
    assert (row(node, "last")["pid"], row(node, "first")["state"]) == (None, "running")
    go.touch()
    node.until(lambda: row(node, "last")["state"] == "running")
    os.kill(row(node, "first")["pid"], signal.SIGKILL)
    node.until(lambda: row(node, "first")["restarts"] == 1)
    assert row(node, "last")["restarts"] == 0


def test_a_service_that_waits_for_others_can_be_stopped(make_node: Make) -> None:
    node = make_node()
    node.add_service("one", "sleep", "1000", readiness={"notify": True})
    node.add_service("last", "sleep", "1000", after=["one"])
    leads(node)
    node.signal(signal.SIGTERM)
    assert node.exit_code() == 0


@pytest.mark.parametrize(
    ("after", "told"),
    [
        ({"one": ["two"], "two": ["three"], "three": ["one"]}, "one after two after three after one"),
        ({"one": ["one"], "two": [], "three": []}, "one after one"),
        ({"one": ["four"], "two": [], "three": []}, "'four'"),
    ],
)
def test_a_circle_and_an_unknown_name_are_told_once(make_node: Make, after: dict[str, list[str]], told: str) -> None:
    node = make_node()
    for name, others in after.items():
        node.add_service(name, "sleep", "1", after=others)
    node.start()
    assert node.exit_code() == 78
    assert told in node.output()
    assert node.output().count("services.") == 1


# --- sections and heartbeats


def test_a_gpu_section_without_an_end_is_ended_by_sigterm_and_then_sigkill(make_node: Make) -> None:
    node = make_node()
    stuck = "import signal; signal.signal(15, signal.SIG_IGN); s = gpu_section(); s.__enter__(); time.sleep(1000)"
    node.add_service("one", *says(stuck), max_gpu_section="1s", restart={"backoff": ["1m"]})
    leads(node)
    first = node.until(lambda: row(node)["pid"])
    asked = 0.0

    def stopping() -> bool:
        nonlocal asked
        before = time.monotonic()
        if row(node)["state"] == "stopping":
            return True
        asked = before
        return False

    node.until(stopping)
    assert "long-section: GPU section of" in row(node)["why"]
    node.until(lambda: gone(first))
    assert time.monotonic() - asked >= TERM_WAIT


def test_a_section_that_ends_and_one_of_a_process_that_has_gone_are_no_fault(make_node: Make) -> None:
    node = make_node()
    gone_in_it = SAYS.format(root=str(ROOT), script="s = gpu_section(); s.__enter__(); import os; os._exit(0)")
    script = (
        f"import subprocess; subprocess.run([sys.executable, '-c', {gone_in_it!r}])\n"
        "while True:\n with gpu_section():\n  with gpu_section(): time.sleep(0.3)\n time.sleep(0.05)"
    )
    node.add_service("one", *says(f"exec({script!r})"), max_gpu_section="3s")
    leads(node)
    pid = node.until(lambda: row(node)["state"] == "running" and row(node)["pid"])
    time.sleep(6)  # a section of one that has gone would be too long by now; and some rounds of the watchdog
    assert row(node)["pid"] == pid


def test_a_service_whose_heartbeats_stop_is_restarted_and_one_that_goes_on_is_not(make_node: Make) -> None:
    node = make_node()
    beats = "ready()\nwhile True:\n heartbeat(); time.sleep(0.2)"
    ready = {"readiness": {"notify": True}, "heartbeat": "4s"}
    node.add_service("alive", *says(f"exec({beats!r})"), **ready)
    node.add_service("silent", *says("ready(); time.sleep(1000)"), **ready, restart={"backoff": ["1m"]})
    leads(node)
    alive = node.until(lambda: row(node, "alive")["state"] == "running" and row(node, "alive")["pid"])
    node.until(lambda: row(node, "silent")["restarts"] == 1)
    assert "silent: no heartbeat for" in node.output()
    assert row(node, "alive")["pid"] == alive


def test_a_flood_of_messages_delays_no_switch_and_kills_nobody_whose_heartbeats_are_lost_in_it(make_node: Make) -> None:
    """Anybody may write to the socket."""
    node = make_node()
    beats = "ready()\nwhile True:\n heartbeat(); time.sleep(0.2)"
    node.add_service("one", *says(f"exec({beats!r})"), readiness={"notify": True}, heartbeat="3s")
    leads(node)
    pid = node.until(lambda: row(node)["state"] == "running" and row(node)["pid"])
    over = threading.Event()
    flood = threading.Thread(target=_flood, args=(str(node.run / "notify.sock"), over))
    flood.start()
    try:
        time.sleep(6)  # some rounds of the watchdog after a heartbeat was due
        status = node.status() or {}
        assert status["keeper"]["tick_s"] < 0.2
        assert status["state"] == "active"
        assert row(node)["pid"] == pid
    finally:
        over.set()
        flood.join()


def _flood(path: str, over: threading.Event) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.settimeout(0.1)
        while not over.is_set():
            try:
                sock.sendto(b"READY=1", path)
            except OSError:
                time.sleep(0.001)


# --- the configuration


@pytest.mark.parametrize(
    ("readiness", "told"),
    [
        ({}, "exactly one of notify, tcp, http and command"),
        ({"notify": True, "tcp": "127.0.0.1:1"}, "exactly one of notify, tcp, http and command"),
        ({"tcp": "127.0.0.1:0"}, "a port from 1 to 65535"),
        ({"http": "ftp://x"}, "a URL such as http://127.0.0.1:8000/health"),
        ({"http": "http://me:secret@x/"}, "a URL without user and password"),
        ({"tcp": "127.0.0.1:1", "model": "x"}, "`model` with `http` only"),
    ],
)
def test_a_wrong_readiness_is_told_with_its_place(make_node: Make, readiness: dict[str, Any], told: str) -> None:
    node = make_node()
    node.add_service("one", "sleep", "1", readiness=readiness)
    node.start()
    assert node.exit_code() == 78
    assert "services.one.readiness" in node.output()
    assert told in node.output()
    assert "secret" not in node.output()


# --- nothing healthy is ended for what is lost or late


def test_an_adopted_service_keeps_what_it_had_whatever_its_readiness_timeout(make_node: Make) -> None:
    node = make_node()
    port = free_port()
    script = f"import socket; s = socket.create_server(('127.0.0.1', {port})); time.sleep(1000)"
    node.add_service("web", *says(script), readiness={"tcp": f"127.0.0.1:{port}", "timeout": "6s"})
    leads(node)
    pid = node.until(lambda: row(node, "web")["state"] == "running" and row(node, "web")["pid"])
    time.sleep(6)  # its time to become ready is over
    node.kill()
    node.start()
    node.until(lambda: node.leads() and row(node, "web")["state"] == "running")
    time.sleep(1)
    assert (row(node, "web")["pid"], row(node, "web")["restarts"]) == (pid, 0)


def test_a_drained_service_that_answers_no_more_stays_so_over_a_restart_of_the_supervisor(make_node: Make) -> None:
    node = make_node()
    port, go = free_port(), node.folder / "go"
    script = (
        f"import socket, signal, os\ns = socket.create_server(('127.0.0.1', {port}))\n"
        f"signal.signal(10, lambda *a: s.close())\nwhile not os.path.exists({str(go)!r}): time.sleep(0.05)"
    )
    ready = {"tcp": f"127.0.0.1:{port}", "timeout": "6s"}
    node.add_service("web", *says(f"exec({script!r})"), readiness=ready, drain_signal="USR1")
    leads(node)
    pid = node.until(lambda: row(node, "web")["state"] == "running" and row(node, "web")["pid"])
    command = [sys.executable, "-m", "supervisor.entry", "service", "drain", "web", "--run-dir", str(node.run)]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0
    node.until(lambda: row(node, "web")["state"] == "draining")
    time.sleep(6)  # its time to become ready is over
    node.kill()
    node.start()
    node.until(lambda: node.leads() and row(node, "web")["state"] == "draining")
    time.sleep(1.2)
    assert row(node, "web")["pid"] == pid
    go.touch()
    node.until(lambda: row(node, "web")["state"] == "stopped")
    assert row(node, "web")["restarts"] == 0


@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
def test_messages_lost_with_a_keeper_end_nobody(make_node: Make, how: signal.Signals) -> None:
    node = make_node()
    beats = "ready()\nwhile True:\n heartbeat()\n with gpu_section(): time.sleep(0.1)"
    node.add_service(
        "beats", *says(f"exec({beats!r})"), readiness={"notify": True}, heartbeat="3s", max_gpu_section="3s"
    )
    late = (
        f"import os\nwhile not os.path.exists({str(node.folder / 'go')!r}): time.sleep(0.02)\nready(); time.sleep(1000)"
    )
    node.add_service("late", *says(f"exec({late!r})"), readiness={"notify": True, "timeout": "5s"})
    leads(node)
    node.until(lambda: row(node, "beats")["state"] == "running")
    pids = row(node, "beats")["pid"], row(node, "late")["pid"]
    keeper = node.keeper()
    os.kill(keeper, how)
    (node.folder / "go").touch()
    node.until(lambda: gone(keeper))
    node.until(lambda: row(node, "late")["state"] == "running" and row(node, "beats")["state"] == "running")
    time.sleep(6)  # some rounds of the watchdog after what was lost was due
    assert (row(node, "beats")["pid"], row(node, "late")["pid"]) == pids


def test_a_keeper_that_stood_still_for_a_moment_makes_no_service_silent(make_node: Make) -> None:
    node = make_node()
    beats = "ready()\nwhile True:\n heartbeat(); time.sleep(0.3)"
    node.add_service("one", *says(f"exec({beats!r})"), readiness={"notify": True}, heartbeat="1s")
    leads(node)
    pid = node.until(lambda: row(node)["state"] == "running" and row(node)["pid"])
    keeper = node.keeper()
    for _ in range(2):
        os.kill(keeper, signal.SIGSTOP)
        time.sleep(1.5)
        os.kill(keeper, signal.SIGCONT)
        time.sleep(1)
    assert row(node)["pid"] == pid


def test_short_floods_of_a_stranger_end_no_service_with_sections(make_node: Make) -> None:
    node = make_node()
    works = "ready()\nwhile True:\n with gpu_section(): time.sleep(0.05)"
    node.add_service("one", *says(f"exec({works!r})"), readiness={"notify": True}, max_gpu_section="1s")
    leads(node)
    pid = node.until(lambda: row(node)["state"] == "running" and row(node)["pid"])
    for _ in range(4):
        over = threading.Event()
        flood = threading.Thread(target=_flood, args=(str(node.run / "notify.sock"), over))
        flood.start()
        time.sleep(0.4)
        over.set()
        flood.join()
        time.sleep(1.8)
    assert row(node)["pid"] == pid


def test_a_model_list_that_comes_in_pieces_is_read_to_its_end(make_node: Make) -> None:
    node = make_node()
    port, model = free_port(), node.folder / "model"
    model.write_text("llama")
    slowly = "[(self.wfile.write(body[i : i + 300000]), time.sleep(0.05)) for i in range(0, len(body), 300000)]"
    pieces = SERVER.replace("self.wfile.write(body)", slowly)
    pieces = pieces.replace("[{", '[{"id": "x" * 600000}, {')
    http = {"http": f"http://127.0.0.1:{port}/v1/models", "model": "llama"}
    node.add_service("one", sys.executable, "-c", pieces, str(port), str(model), readiness=http)
    leads(node)
    node.until(lambda: row(node)["state"] == "running")
