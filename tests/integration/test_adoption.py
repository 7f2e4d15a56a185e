"""A supervisor, a keeper, or both are killed while services run: what runs goes on (rules 15 and 16)."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from supervisor import proc
from supervisor.gpu.simulated import set_state
from tests.bed.nodes import LONG_TTL, TTL, Make, NodeBed, gone

SLEEPER = ("sleep", "1000")
EIGHT = ("a", "b", "c", "d", "e", "f", "g", "h")
CLOSES_ITS_FDS = ("sh", "-c", "exec 3>&-; exec sleep 1000")


def _pids(status: dict[str, Any]) -> dict[str, int]:
    return {row["name"]: row["pid"] for row in status["services"]}


def _kill_keeper(node: NodeBed) -> int:
    keeper = node.keeper()
    os.kill(keeper, signal.SIGKILL)
    return keeper


def _eight(node: NodeBed) -> dict[str, Any]:
    for name in EIGHT:
        node.add_service(name, *SLEEPER)
    return node.start().until_leading()


def _leads_again(node: NodeBed, not_keeper: int | None = None) -> dict[str, Any]:
    """Its status once it leads with everything running, under a keeper other than `not_keeper`."""

    def look() -> dict[str, Any] | None:
        found = node.status() if node.leads() else None
        if found is None or found["keeper"] is None or found["keeper"]["pid"] == not_keeper:
            return None
        return found if all(row["state"] == "running" for row in found["services"]) else None

    return node.until(look)


@contextlib.contextmanager
def _lock_run(node: NodeBed, *command: str) -> Iterator["subprocess.Popen[bytes]"]:
    words = [sys.executable, "-m", "supervisor.entry", "lock", "run", "--run-dir", str(node.run), "--gpu", "0", "--"]
    with subprocess.Popen([*words, *command], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE) as run:
        try:
            yield run
        finally:
            run.kill()


def _lock_is_free(node: NodeBed) -> bool:
    with _lock_run(node, "true") as run:
        run.communicate()
    return run.returncode == 0


def _holder(node: NodeBed) -> Any:
    return ((node.status() or {}).get("gpus") or [{}])[0].get("lock", {}).get("holder")


# --- who is killed


def test_a_supervisor_killed_with_eight_services_resumes_its_term_and_restarts_none(make_node: Make) -> None:
    node = make_node(ttl=LONG_TTL).after_an_orderly_end()
    before = _eight(node)
    node.kill()
    node.start()
    after = _leads_again(node)
    assert after["term"]["token"] == before["term"]["token"]
    assert _pids(after) == _pids(before)
    assert [row["restarts"] for row in after["services"]] == [0] * 8
    assert after["takeovers"] == []  # nobody took over


def test_a_keeper_killed_with_eight_services_is_replaced_and_none_is_restarted(make_node: Make) -> None:
    """Its exit is seen from then on too, although its code is lost."""
    node = make_node().after_an_orderly_end()
    before = _eight(node)
    keeper = _kill_keeper(node)
    after = _leads_again(node, not_keeper=keeper)
    assert after["term"]["token"] == before["term"]["token"]
    assert _pids(after) == _pids(before)
    os.kill(_pids(after)["c"], signal.SIGKILL)
    again = node.until(
        lambda: (s := node.status()) and next(row for row in s["services"] if row["name"] == "c")["restarts"] and s
    )
    assert next(row for row in again["services"] if row["name"] == "c")["failures"] == 1
    time.sleep(TTL)  # through refreshes: the new keeper takes every later deadline
    assert _leads_again(node)["term"]["token"] == before["term"]["token"]


def test_supervisor_and_keeper_killed_together_leave_services_that_their_successors_adopt(make_node: Make) -> None:
    node = make_node(ttl=LONG_TTL).after_an_orderly_end()
    before = _eight(node)
    keeper = _kill_keeper(node)
    node.kill()
    node.start()
    after = _leads_again(node, not_keeper=keeper)
    assert after["term"]["token"] == before["term"]["token"]
    assert _pids(after) == _pids(before)


def test_a_stopped_keeper_is_killed_and_replaced_and_no_service_with_it(make_node: Make) -> None:
    node = make_node(ttl=LONG_TTL).after_an_orderly_end()
    before = _eight(node)
    keeper = node.keeper()
    os.kill(keeper, signal.SIGSTOP)
    node.until(lambda: gone(keeper))
    after = _leads_again(node, not_keeper=keeper)
    assert _pids(after) == _pids(before)
    assert after["term"]["token"] == before["term"]["token"]


def test_after_its_deadline_a_term_is_not_resumed(make_node: Make) -> None:
    """Rule 15: the keeper's switch has ended it."""
    node = make_node().after_an_orderly_end()
    before = _eight(node)
    node.kill()
    node.until(lambda: all(map(gone, _pids(before).values())))
    after = node.start().until_leading()
    assert after["term"]["token"] > before["term"]["token"]
    assert not set(_pids(after).values()) & set(_pids(before).values())


def test_a_term_that_was_lost_meanwhile_is_ended_by_the_resumed_supervisor(make_node: Make) -> None:
    """Rule 15: nothing follows but a guarded refresh."""
    node = make_node().after_an_orderly_end()
    before = _eight(node)
    node.kill()
    node.lose_the_lock()
    node.start()
    node.until(lambda: all(map(gone, _pids(before).values())))
    assert node.until_leading()["term"]["token"] > before["term"]["token"]


# --- locks


@pytest.mark.parametrize("command", [SLEEPER, CLOSES_ITS_FDS], ids=["keeps-its-fds", "closes-its-fds"])
@pytest.mark.parametrize("killed", ["supervisor", "keeper", "both"])
def test_a_lifetime_lock_is_kept_through_it_and_is_free_after_its_service(
    make_node: Make, command: tuple[str, ...], killed: str
) -> None:
    """A service that closes every inherited fd: the keeper's duplicate is all there is, and its successor has one."""
    node = make_node(ttl=LONG_TTL).after_an_orderly_end()
    node.add_service("owner", *command, gpu=0, lock="lifetime", gpu_fd="optional")
    before = node.start().until_leading()
    keeper = None if killed == "supervisor" else _kill_keeper(node)
    if killed != "keeper":
        node.kill()
        node.start()
    after = _leads_again(node, not_keeper=keeper)
    assert _pids(after) == _pids(before)
    assert node.until(lambda: _holder(node))["service"] == "owner"  # known once the new keeper has been asked
    assert not _lock_is_free(node)
    _service(node, "stop", "owner")
    node.until(lambda: _lock_is_free(node))


@pytest.mark.parametrize("killed", ["supervisor", "keeper", "both"])
def test_a_job_keeps_the_lock_through_it_and_frees_it_at_its_end(make_node: Make, killed: str) -> None:
    node = make_node(ttl=LONG_TTL).after_an_orderly_end()
    node.add_service("one", *SLEEPER)
    node.start().until_leading()
    with _lock_run(node, "sleep", "1000"):
        held = node.until(lambda: _holder(node))
        keeper = None if killed == "supervisor" else _kill_keeper(node)
        if killed != "keeper":
            node.kill()
            node.start()
        _leads_again(node, not_keeper=keeper)
        holder = node.until(lambda: _holder(node))
        assert {key: holder[key] for key in ("pid", "since", "command")} == {
            key: held[key] for key in ("pid", "since", "command")
        }
        assert not _lock_is_free(node)
    node.until(lambda: _lock_is_free(node))


# --- what is remembered


def _service(node: NodeBed, verb: str, name: str) -> str:
    command = [sys.executable, "-m", "supervisor.entry", "service", verb, name, "--run-dir", str(node.run)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_what_an_operator_stopped_and_what_is_degraded_stays_so(make_node: Make) -> None:
    node = make_node(ttl=LONG_TTL).after_an_orderly_end()
    node.add_service("held", *SLEEPER)
    node.add_service("broken", "false", restart={"backoff": ["100ms", "100ms", "100ms"]})
    node.add_service("one", *SLEEPER)
    node.start()

    def states() -> dict[str, str]:
        return {row["name"]: row["state"] for row in (node.status() or {"services": []})["services"]}

    node.until(lambda: states().get("broken") == "degraded" and states()["one"] == "running")
    _service(node, "stop", "held")
    node.until(lambda: states()["held"] == "stopped")
    node.kill()
    node.start()
    node.until(lambda: node.leads() and states()["one"] == "running")
    assert states() == {"held": "stopped", "broken": "degraded", "one": "running"}
    _service(node, "start", "held")
    node.until(lambda: states()["held"] == "running")


def test_a_service_whose_configuration_changed_is_adopted_and_one_that_is_gone_is_ended(make_node: Make) -> None:
    node = make_node(ttl=LONG_TTL).after_an_orderly_end()
    node.add_service("changed", *SLEEPER)
    node.add_service("removed", *SLEEPER)
    before = node.start().until_leading()
    node.kill()
    node.add_service("changed", "sleep", "2000")
    del node.config["services"]["removed"]
    node.start()
    after = _leads_again(node)
    assert _pids(after) == {"changed": _pids(before)["changed"]}
    node.until(lambda: gone(_pids(before)["removed"]))
    assert "changed: its configuration has changed: `gpuward service restart changed` applies it" in node.output()


@pytest.mark.parametrize("content", [b"", b"{", b'{"boot_id": 7}', b"[]", b"\xff\xfe", b"{}" * 100_000])
def test_records_that_cannot_be_read_are_set_aside_and_the_services_adopted_all_the_same(
    make_node: Make, content: bytes
) -> None:
    """The keeper knows what runs: a service's own record is never trusted with that."""
    node = make_node(ttl=LONG_TTL).after_an_orderly_end()
    node.add_service("one", *SLEEPER)
    before = node.start().until_leading()
    node.kill()
    (node.run / "services" / "one.json").write_bytes(content)
    node.start()
    assert _pids(_leads_again(node)) == _pids(before)
    assert any(row["kind"] == "record" for row in (node.status() or {})["alarms"])
    assert list((node.run / "services").glob("one.json.damaged-*"))


def _spoil(node: NodeBed, change: str) -> None:
    path = node.run / "keeper.json"
    data = json.loads(path.read_text())
    row = data["services"]["one"]
    if change == "pid-reused":
        row["start_ticks"] -= 1
    elif change == "stranger":
        row["pid"], row["start_ticks"] = os.getpid(), (proc.stat(os.getpid()) or pytest.fail("?")).start_ticks
    elif change == "unknown":
        del data["services"]["one"]
    elif change == "rebooted":
        data["boot_id"] = "another"
    elif change == "corrupt":
        path.write_text("{")
        return
    elif change == "missing":
        path.unlink()
        return
    path.write_text(json.dumps(data))


@pytest.mark.parametrize("change", ["pid-reused", "stranger", "unknown", "rebooted", "corrupt", "missing"])
def test_what_a_new_keeper_cannot_prove_is_ended_by_its_cgroup_and_started_again(make_node: Make, change: str) -> None:
    node = make_node(ttl=LONG_TTL).after_an_orderly_end()
    node.add_service("one", *SLEEPER)
    before = node.start().until_leading()
    _kill_keeper(node)
    node.kill()
    _spoil(node, change)
    after = node.start().until_leading()
    assert gone(_pids(before)["one"])
    assert node.service_pids() == [_pids(after)["one"]]


def test_a_keeper_killed_at_any_moment_leaves_no_process_that_nobody_knows(make_node: Make) -> None:
    """Again and again while services are started: each is there once in the end, and nothing besides."""
    node = make_node(ttl=LONG_TTL).after_an_orderly_end()
    for name in EIGHT:
        node.add_service(name, *SLEEPER, restart={"backoff": ["100ms"] * 50})
    before = node.start().until_leading()
    chance = random.Random(7)
    for _ in range(15):
        for pid in chance.sample(node.service_pids(), 4):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(chance.random() * 0.03)
        keeper = _kill_keeper(node)
        _leads_again(node, not_keeper=keeper)
        node.until(lambda: set(node.service_pids()) == set(_pids(node.status() or before).values()))


def test_a_supervisor_killed_at_any_moment_leaves_no_process_that_nobody_knows(make_node: Make) -> None:
    node = make_node(ttl=LONG_TTL).after_an_orderly_end()
    for name in EIGHT:
        node.add_service(name, *SLEEPER, restart={"backoff": ["100ms"] * 50})
    first = node.start().until_leading()
    chance = random.Random(8)
    for _ in range(8):
        for pid in chance.sample(node.service_pids(), 4):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(chance.random() * 0.05)
        node.kill()
        node.start()
        status = _leads_again(node)
        assert status["term"]["token"] == first["term"]["token"]
        node.until(lambda: set(node.service_pids()) == set(_pids(node.status() or first).values()))


def _drainer(node: NodeBed) -> None:
    """Ends by itself 0.5 s after it was told to drain, unless `go` is missing."""
    script = f"trap 'while [ ! -e {node.folder}/go ]; do sleep 0.05; done; exit 0' USR1; while :; do sleep 0.05; done"
    node.add_service("one", "sh", "-c", script, drain_signal="USR1")


def _state(node: NodeBed) -> str:
    return str((node.status() or {"services": [{"state": ""}]})["services"][0]["state"])


def test_a_drained_service_ends_by_itself_without_failure_and_stays_stopped(make_node: Make) -> None:
    node = make_node(ttl=LONG_TTL).after_an_orderly_end()
    _drainer(node)
    before = node.start().until_leading()
    _service(node, "drain", "one")
    node.until(lambda: _state(node) == "draining")
    assert not gone(_pids(before)["one"])
    (node.folder / "go").touch()
    node.until(lambda: _state(node) == "stopped")
    row = (node.status() or {})["services"][0]
    assert (row["failures"], row["restarts"], row["why"]) == (0, 0, "stopped by an operator")
    _service(node, "start", "one")
    node.until(lambda: _state(node) == "running")


def test_a_service_that_drains_goes_on_draining_over_a_restart_of_the_supervisor(make_node: Make) -> None:
    node = make_node(ttl=LONG_TTL).after_an_orderly_end()
    _drainer(node)
    before = node.start().until_leading()
    _service(node, "drain", "one")
    node.until(lambda: _state(node) == "draining")
    record = node.run / "services" / "one.json"
    node.until(lambda: json.loads(record.read_text())["state"] == "draining")  # it is written beside the loop
    node.kill()
    node.start()
    node.until(lambda: _state(node) == "draining")
    assert not gone(_pids(before)["one"])
    (node.folder / "go").touch()
    node.until(lambda: _state(node) == "stopped")


def test_a_restart_of_a_draining_service_runs_it_again(make_node: Make) -> None:
    node = make_node(ttl=LONG_TTL).after_an_orderly_end()
    _drainer(node)
    before = node.start().until_leading()
    _service(node, "drain", "one")
    node.until(lambda: _state(node) == "draining")
    _service(node, "restart", "one")
    node.until(lambda: _state(node) == "running" and _pids(node.status() or before)["one"] != _pids(before)["one"])


def test_two_hundred_services_start_at_once_and_are_all_adopted(make_node: Make) -> None:
    node = make_node(ttl=LONG_TTL).after_an_orderly_end()
    for number in range(200):
        node.add_service(f"s{number}", *SLEEPER)
    before = node.start().until_leading()
    assert len(set(_pids(before).values())) == 200
    assert before["takeovers"][0]["work_s"] < 20
    node.kill()
    keeper = _kill_keeper_of(before)
    node.start()
    after = node.until_leading()
    assert after["keeper"]["pid"] != keeper
    assert _pids(after) == _pids(before)
    assert sorted(node.service_pids()) == sorted(_pids(after).values())


def _kill_keeper_of(status: dict[str, Any]) -> int:
    keeper = int(status["keeper"]["pid"])
    os.kill(keeper, signal.SIGKILL)
    return keeper


@pytest.mark.parametrize("moment", [0.0, 0.02, 0.05, 0.2])
def test_a_keeper_lost_while_its_term_is_being_resumed_costs_no_service(make_node: Make, moment: float) -> None:
    node = make_node(ttl=LONG_TTL).after_an_orderly_end()
    before = _eight(node)
    node.kill()
    node.start()
    node.until(lambda: "resuming term" in node.output())
    time.sleep(moment)
    os.kill(before["keeper"]["pid"], signal.SIGKILL)
    after = _leads_again(node, not_keeper=before["keeper"]["pid"])
    assert after["term"]["token"] == before["term"]["token"]
    assert _pids(after) == _pids(before)


def test_a_successor_that_is_killed_too_gets_a_successor(make_node: Make) -> None:
    node = make_node(ttl=LONG_TTL).after_an_orderly_end()
    before = _eight(node)
    _kill_keeper(node)
    log = node.run / "keeper.log"
    node.until(lambda: "goes on: adopted" in log.read_text())
    second = int((node.run / "keeper.pid").read_text())
    os.kill(second, signal.SIGKILL)
    after = _leads_again(node, not_keeper=second)
    assert after["term"]["token"] == before["term"]["token"]
    assert _pids(after) == _pids(before)


def test_a_driver_that_does_not_answer_during_a_resumption_costs_no_service(make_node: Make) -> None:
    node = make_node(ttl=LONG_TTL).after_an_orderly_end()
    before = _eight(node)
    set_state(node.folder / "gpu", 0, answer_s=30)
    node.kill()
    node.start()
    after = node.until_leading()
    assert after["term"]["token"] == before["term"]["token"]
    assert _pids(after) == _pids(before)


@pytest.mark.parametrize("killed", ["keeper", "both"])
def test_a_scope_frees_its_lock_also_after_the_keeper_was_replaced(make_node: Make, killed: str) -> None:
    node = make_node(ttl=LONG_TTL).after_an_orderly_end()
    node.add_service("one", *SLEEPER)
    node.start().until_leading()
    script = "from supervisor.mutex import gpu_lock\nwith gpu_lock(0): input()\nprint('left', flush=True); input()"
    environment = {**os.environ, "GPUWARD_RUN_DIR": str(node.run)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", script], env=environment, **pipes) as user:  # type: ignore[call-overload]
        try:
            node.until(lambda: _holder(node))
            keeper = _kill_keeper(node)
            if killed == "both":
                node.kill()
                node.start()
            _leads_again(node, not_keeper=keeper)
            assert not _lock_is_free(node)
            user.stdin.write(b"\n")
            user.stdin.flush()
            assert user.stdout.readline() == b"left\n"
            node.until(lambda: _lock_is_free(node))
        finally:
            user.kill()


@pytest.mark.parametrize("change", [{"backoffs": -7}, {"backoffs": 1.5}, {"failures": True}, {"last_failure": "nan"}])
def test_a_record_with_impossible_numbers_is_set_aside(make_node: Make, change: dict[str, Any]) -> None:
    node = make_node(ttl=LONG_TTL).after_an_orderly_end()
    node.add_service("one", *SLEEPER, restart={"backoff": ["100ms"] * 9})
    before = node.start().until_leading()
    node.kill()
    path = node.run / "services" / "one.json"
    data = json.loads(path.read_text())
    data["account"] |= change
    path.write_text(json.dumps(data))
    node.start()
    assert _pids(_leads_again(node)) == _pids(before)
    assert list(path.parent.glob("one.json.damaged-*"))
    os.kill(_pids(before)["one"], signal.SIGKILL)
    node.until(lambda: _pids(node.status() or before)["one"] not in (None, _pids(before)["one"]))


@pytest.mark.parametrize("killed", ["supervisor", "keeper", "both"])
def test_sidecars_are_adopted_with_their_service_and_their_end_is_noticed_afterwards(
    make_node: Make, killed: str
) -> None:
    node = make_node(ttl=LONG_TTL).after_an_orderly_end()
    node.add_service("one", *SLEEPER, sidecars={"proxy": {"command": list(SLEEPER), "ready_after": "100ms"}})
    before = node.start().until_leading()
    sidecar = before["services"][0]["sidecars"][0]
    keeper = None if killed == "supervisor" else _kill_keeper(node)
    if killed != "keeper":
        node.kill()
        node.start()
    after = _leads_again(node, not_keeper=keeper)
    assert _pids(after) == _pids(before)
    assert after["services"][0]["sidecars"] == [sidecar]
    os.kill(sidecar["pid"], signal.SIGKILL)
    again = node.until(lambda: (s := node.status()) and s["services"][0]["restarts"] and s)
    assert again["services"][0]["failures"] == 1
    node.until(lambda: (node.status() or before)["services"][0]["sidecars"][0]["pid"] not in (None, sidecar["pid"]))


@pytest.mark.parametrize("killed", ["supervisor", "keeper", "both"])
def test_a_start_that_has_come_to_the_sidecars_begins_anew_and_leaves_nothing(make_node: Make, killed: str) -> None:
    node = make_node(ttl=LONG_TTL).after_an_orderly_end()
    wait = {"command": ["sh", "-c", f"while [ ! -e {node.folder}/go ]; do sleep 0.05; done; exec sleep 1000"]}
    node.add_service("one", *SLEEPER, sidecars={"a": wait | {"ready_after": "2s"}, "b": wait | {"ready_after": "1s"}})
    node.add_service("other", *SLEEPER)

    def sidecars() -> list[Any]:
        rows = (node.status() or {"services": []})["services"]
        return [row["pid"] for row in rows[0]["sidecars"]] if rows else []

    node.start()
    first = node.until(lambda: (found := sidecars()) and found[0] and found)
    keeper = None if killed == "supervisor" else _kill_keeper(node)
    if killed != "keeper":
        node.kill()
        node.start()
    (node.folder / "go").touch()
    after = _leads_again(node, not_keeper=keeper)
    assert gone(first[0])
    pids = [row["pid"] for one in after["services"] for row in (one, *one["sidecars"])]
    assert sorted(node.service_pids()) == sorted(pids)


def test_a_pause_goes_on_over_a_restart_of_the_supervisor(make_node: Make) -> None:
    node = make_node(ttl=LONG_TTL).after_an_orderly_end()
    node.add_service("broken", "false", restart={"backoff": ["1h"]})
    node.add_service("one", *SLEEPER)
    node.start()

    def broken() -> dict[str, Any]:
        rows = (node.status() or {"services": []})["services"]
        return next((row for row in rows if row["name"] == "broken"), {"state": ""})

    before = node.until(lambda: (row := broken())["state"] == "backoff" and row)
    record = node.run / "services" / "broken.json"
    node.until(lambda: record.exists() and json.loads(record.read_text())["next_at"])
    node.kill()
    node.start()
    node.until(node.leads)
    after = broken()
    assert after["state"] == "backoff"
    assert 3000 < after["next_s"] < before["next_s"]
    _service(node, "restart", "broken")
    node.until(lambda: broken()["state"] == "degraded")
