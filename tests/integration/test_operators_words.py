"""`gpuward switchover|pause|resume|exclude|include|reset-floor` on real supervisors (rules 12 and 21)."""

import json
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from typing import Any

import pytest

from supervisor.api.unix import API_SOCKET
from supervisor.gpu.simulated import set_state
from tests.bed.keeper import PATIENCE
from tests.bed.nodes import LONG_TTL, Make, NodeBed, gone
from tests.integration.test_service_commands import ask

SLEEPER = ("sleep", "1000")


def gpuward(node: NodeBed, *words: str, reach: bool = True) -> "subprocess.CompletedProcess[str]":
    where = ("--run-dir", str(node.run)) if reach else ("--config", str(node.folder / "gpuward.yml"))
    command = [sys.executable, "-m", "supervisor.entry", *words, *where]
    return subprocess.run(command, capture_output=True, text=True, timeout=3 * PATIENCE, check=False)


def standby(node: NodeBed) -> dict[str, Any] | None:
    """Its status once it is fit, has told so, and has seen who leads."""
    found = node.status()
    return found if found and found["leader"] and node.told_role() == "standby" else None


@pytest.fixture
def nodes(make_node: Make) -> tuple[NodeBed, NodeBed]:
    """The first leads with one service, the second stands by. No lease runs out during a test."""
    first, second = make_node("n1", ttl=LONG_TTL).after_an_orderly_end(), make_node("n2", ttl=LONG_TTL)
    for node in (first, second):
        node.add_service("one", *SLEEPER)
    first.start().until_leading()
    second.start().until(lambda: standby(second))
    return first, second


def service(node: NodeBed) -> int:
    found = node.until(node.status)
    return int(found["services"][0]["pid"])


def test_a_switchover_asked_for_on_any_node_passes_the_lock_on_to_its_target(nodes: tuple[NodeBed, NodeBed]) -> None:
    first, second = nodes
    pid, token = service(first), first.until(first.status)["term"]["token"]
    done = gpuward(second, "switchover", "n2", "--wait", "--format", "json")
    assert done.returncode == 0, done
    assert json.loads(done.stdout)["message"].startswith("n2 leads with token")
    assert gone(pid)
    found = second.until_leading()
    assert found["term"]["token"] > token
    second.until(lambda: not (second.status() or {"switchover": "?"})["switchover"])  # the claim has deleted it
    assert found["takeovers"][-1]["from"] == "n1"
    assert gpuward(first, "switchover", "n1", "--wait").returncode == 0  # and back
    assert first.until_leading()["term"]["token"] > found["term"]["token"]


def test_a_switchover_to_a_node_that_is_not_fit_is_refused_and_harms_nobody(nodes: tuple[NodeBed, NodeBed]) -> None:
    first, second = nodes
    pid = service(first)
    set_state(second.folder / "gpu", 0, verdict="lost")
    second.until(lambda: second.told_role() == "unfit")
    refused = gpuward(first, "switchover", "n2")
    assert (refused.returncode, "n2 cannot lead: GPU 0 is lost" in refused.stderr) == (75, True)
    unknown = gpuward(first, "switchover", "n9")
    assert (unknown.returncode, "members are: n1, n2" in unknown.stderr) == (4, True)
    assert gpuward(first, "switchover", "n1").returncode == 75
    assert service(first) == pid


def test_a_target_that_has_stopped_turning_is_refused_and_the_holder_goes_on(nodes: tuple[NodeBed, NodeBed]) -> None:
    """Its record still says that it is fit: it must say so of this very request."""
    first, second = nodes
    pid = service(first)
    second.signal(signal.SIGSTOP)
    try:
        refused = gpuward(first, "switchover", "n2", "--wait")
    finally:
        second.signal(signal.SIGCONT)
    assert (refused.returncode, "n2 has not said within 5 s" in refused.stdout) == (75, True), refused
    assert service(first) == pid
    assert "n2 has not said" in first.until(first.status)["switchover"]["refused"]
    assert gpuward(first, "switchover", "n2", "--wait").returncode == 0  # a new request takes the place of the old one


def test_where_the_target_dies_on_the_way_another_leads_after_the_hold_back(make_node: Make) -> None:
    first, second = make_node("n1", ttl=LONG_TTL).after_an_orderly_end(), make_node("n2", ttl=LONG_TTL)
    armed = first.folder / "armed"
    first.add_service("one", "sh", "-c", f'trap "" TERM; touch {armed}; while :; do sleep 0.05; done')
    first.start().until_leading()
    first.until(armed.exists)
    second.start().until(lambda: standby(second))
    assert gpuward(first, "switchover", "n2").returncode == 0
    first.until(lambda: "asked for on n1" in (first.status() or {"why": ""})["why"])
    second.kill()
    again = first.until(lambda: found if (found := first.status()) and len(found["takeovers"]) == 2 else None)
    assert again["leader"]["node"] == "n1"
    first.until(lambda: not (first.status() or {"switchover": "?"})["switchover"])


@pytest.mark.parametrize("word", ["pause", "exclude"])
def test_nobody_takes_over_against_an_operators_word_until_it_is_taken_back(
    nodes: tuple[NodeBed, NodeBed], word: str
) -> None:
    first, second = nodes
    pid = service(first)
    words, back = (("pause",), ("resume",)) if word == "pause" else (("exclude", "n2"), ("include", "n2"))
    assert gpuward(first, *words, "--because", "a new fan").returncode == 0
    assert "already" in gpuward(second, *words).stdout
    second.until(lambda: "a new fan" in json.dumps(second.status()))
    assert service(first) == pid  # who leads goes on
    refused = gpuward(second, "switchover", "n2")
    assert (refused.returncode, f"gpuward {' '.join(back)}" in refused.stderr) == (75, True)
    first.signal(signal.SIGTERM)
    assert first.exit_code() == 0
    waits = second.until(lambda: found if (found := second.status()) and not found["leader"] else None)
    assert (waits["role"], "a new fan" in waits["why"]) == ("standby" if word == "pause" else "excluded", True)
    assert "a new fan" in gpuward(second, "status").stdout
    assert gpuward(second, *back).returncode == 0
    second.until(second.leads)
    assert gpuward(second, *back).stdout.rstrip().endswith(("it is not paused", "n2 is not excluded"))


def test_operators_words_need_the_socket_and_a_body_that_says_what_is_meant(nodes: tuple[NodeBed, NodeBed]) -> None:
    first, _ = nodes
    with pytest.raises(urllib.error.HTTPError) as refused, urllib.request.urlopen(f"{first.url}/pause", b"") as _:
        pass
    with refused.value:
        assert refused.value.code == 403
    for path, body in [
        ("/switchover", b""),
        ("/switchover", b'{"target": 7}'),
        ("/switchover", b'{"target": "n2", "force": true}'),
        ("/switchover", b'{"target": "/etc/passwd"}'),
        ("/exclude", b'["n2"]'),
        ("/pause", b'{"because": "' + b"x" * 501 + b'"}'),
        ("/resume", b"{}"),
        ("/include", b"\xff"),
    ]:
        code, answer = ask(first, "POST", path, body)
        assert (code, list(answer)) == (400, ["error"]), (path, body, answer)
    assert first.until(first.status)["paused"] is None
    assert (first.run / API_SOCKET).is_socket()


def test_a_node_that_has_seen_a_higher_token_leads_again_after_its_floor_is_reset(make_node: Make) -> None:
    node = make_node("n1", ttl=LONG_TTL).after_an_orderly_end()
    state = node.folder / "state"
    state.mkdir()
    (state / "floor.json").write_text('{"token": 900000}')
    node.start().until(lambda: "floor.json" in json.dumps((node.status() or {"unfit_because": ""})["unfit_because"]))
    running = gpuward(node, "reset-floor", "--yes", reach=False)
    assert (running.returncode, "stop it first" in running.stderr) == (75, True)
    node.signal(signal.SIGTERM)
    node.exit_code()
    asked = gpuward(node, "reset-floor", reach=False)
    assert (asked.returncode, "900000" in asked.stdout, "nothing was changed" in asked.stderr) == (64, True, True)
    assert gpuward(node, "reset-floor", "--yes", reach=False).returncode == 0
    aside = list(state.glob("floor.json.reset-*"))
    assert [json.loads(file.read_text())["token"] for file in aside] == [900000]
    node.start().until(node.leads)
