"""Sidecars, commands that look at a service, and liveness: with real processes on a real keeper."""

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from supervisor import proc
from supervisor.config.service import Liveness, Readiness, Service, Sidecar
from supervisor.service.footprint import Footprint
from supervisor.service.requests import Verb
from supervisor.service.states import State
from tests.bed.keeper import Bed, soon, until
from tests.bed.services import NodeBed, node_on, shell, spec

SLEEP = ("sleep", "1000")


def sidecar(*command: str, **fields: Any) -> Sidecar:
    return Sidecar(command=command, **({"ready_after": 0.05} | fields))


def _sidecars(node: NodeBed, name: str = "s") -> dict[str, Any]:
    return {row["name"]: row for row in node.row(name)["sidecars"]}


def _lives(pid: int) -> bool:
    found = proc.stat(pid)
    return found is not None and found.state not in "ZX"


def _has_open(pid: int, file: Path) -> bool:
    return any(fd.samefile(file) for fd in Path(f"/proc/{pid}/fd").iterdir())


async def test_sidecars_start_in_order_before_their_service_each_once_the_one_before_is_ready(any_keeper: Bed) -> None:
    note = f"echo $NAME >> {any_keeper.run}/order"
    says = f"""
import os, socket, time
time.sleep(0.3)
open("{any_keeper.run}/order", "a").write("first\\n")
socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(b"READY=1", os.environ["NOTIFY_SOCKET"])
time.sleep(1000)
"""
    sidecars = {
        "first": sidecar(sys.executable, "-c", says, readiness=Readiness(notify=True)),
        "second": sidecar("sh", "-c", f"{note}; exec sleep 1000", env={"NAME": "second"}),
    }
    service = shell(f"{note}; exec sleep 1000", env={"NAME": "service"}, sidecars=sidecars)
    async with node_on(any_keeper, s=service) as node:
        await node.launch()
        row = await node.state("s", State.RUNNING)
        assert await node.file("order") == "first\nsecond\nservice\n"
        assert all(one["state"] == "running" and _lives(one["pid"]) for one in row["sidecars"])
        await node.services.request("s", Verb.STOP, no_start="")
        await node.state("s", State.STOPPED)
        assert not any(_lives(one["pid"]) for one in row["sidecars"])
        assert [one["pid"] for one in node.row("s")["sidecars"]] == [None, None]


async def test_the_end_of_a_sidecar_is_a_failure_of_its_service_and_both_start_again(any_keeper: Bed) -> None:
    async with node_on(any_keeper, s=spec(*SLEEP, sidecars={"proxy": sidecar(*SLEEP)})) as node:
        await node.launch()
        before = await node.state("s", State.RUNNING)
        side = _sidecars(node)["proxy"]["pid"]
        os.kill(side, signal.SIGKILL)
        await node.new_pid("s", before["pid"])
        after = await node.state("s", State.RUNNING)
        assert (after["failures"], after["restarts"]) == (1, 1)
        assert _sidecars(node)["proxy"]["pid"] != side
        assert not _lives(before["pid"])
        assert any("sidecar proxy: ended by SIGKILL" in event for event in node.events)


@pytest.mark.parametrize(
    ("made", "why"),
    [
        ({"command": ("no-such-command",)}, "sidecar proxy: did not start: its command: No such file"),
        ({"command": ("sh", "-c", "exit 4")}, "sidecar proxy: exited unexpectedly with 4"),
        (
            {"command": SLEEP, "readiness": Readiness(notify=True, timeout=0.3)},
            "sidecar proxy: not ready within 0.3 s (it has not said READY=1)",
        ),
    ],
    ids=["no-command", "exits", "never-ready"],
)
async def test_a_service_whose_sidecar_does_not_come_up_never_starts_and_is_degraded_in_the_end(
    keeper: Bed, made: dict[str, Any], why: str
) -> None:
    broken = sidecar(*made.pop("command"), ready_after=5, **made)
    service = shell(f"touch {keeper.run}/started; exec sleep 1000", sidecars={"proxy": broken})
    async with node_on(keeper, s=service, other=spec(*SLEEP)) as node:
        await node.launch()
        row = await node.state("s", State.DEGRADED)
        assert why in row["why"]
        assert node.row("other")["state"] == "running"
        assert not (keeper.run / "started").exists()


async def test_a_lifetime_lock_is_taken_before_the_sidecars_and_kept_by_the_service_alone(keeper: Bed) -> None:
    mine = {"gpu": 0, "lock": "lifetime", "gpu_fd": "optional"}
    first = spec(*SLEEP, priority=1, sidecars={"proxy": sidecar(*SLEEP, ready_after=0.5)}, **mine)
    async with node_on(keeper, first=first, second=spec(*SLEEP, **mine)) as node:
        await node.launch()
        await until(lambda: _sidecars(node, "first")["proxy"]["pid"], "the sidecar")
        assert node.row("first")["pid"] is None
        assert node.row("first")["lock"] == "held"
        await node.state("second", State.WAITING_LOCK)
        await node.state("first", State.RUNNING)
        assert not _has_open(_sidecars(node, "first")["proxy"]["pid"], node.lock_file)
        assert _has_open(node.row("first")["pid"], node.lock_file)
        await node.services.request("first", Verb.STOP, no_start="")
        await node.state("second", State.RUNNING)


async def test_a_stop_while_sidecars_come_up_ends_them(keeper: Bed) -> None:
    slow = sidecar(*SLEEP, ready_after=100)
    async with node_on(keeper, s=spec(*SLEEP, sidecars={"slow": slow})) as node:
        await node.launch()
        pid = await until(lambda: _sidecars(node)["slow"]["pid"], "the sidecar")
        await node.services.request("s", Verb.STOP, no_start="")
        await node.state("s", State.STOPPED)
        assert not _lives(pid)


async def test_a_command_tells_readiness_in_the_cgroup_and_environment_of_its_service(any_keeper: Bed) -> None:
    run = any_keeper.run
    look = ("sh", "-c", f"cat /proc/self/cgroup >> {run}/looked; test -e {run}/go-$COLOUR")
    service = spec(*SLEEP, env={"COLOUR": "red"}, readiness=Readiness(command=look))
    async with node_on(any_keeper, s=service) as node:
        await node.launch()
        await until(lambda: "`sh` left with 1" in node.row("s")["why"], "a look that failed")
        (run / "go-red").touch()
        await node.state("s", State.RUNNING)
        cgroup = any_keeper.cgroup
        assert cgroup is None or f"0::{cgroup}/term-1/s/look-ready" in (run / "looked").read_text()


async def test_a_command_that_hangs_is_killed_with_all_that_it_started(keeper: Bed) -> None:
    look = ("sh", "-c", f"echo $$ >> {keeper.run}/looks; setsid sleep 1000 & wait")
    async with node_on(keeper, s=spec(*SLEEP, readiness=Readiness(command=look, timeout=100))) as node:
        await node.launch()
        await until(lambda: "did not end within 2 s" in node.row("s")["why"], "a look in vain")
        assert node.row("s")["state"] == "starting"
        pids = (keeper.run / "looks").read_text().split()
        await until(lambda: not _lives(int(pids[0])), "its end")
        await until(lambda: len((keeper.run / "looks").read_text().split()) > 1, "the next look")


async def test_liveness_counts_only_looks_that_fail_in_a_row_and_starts_anew_with_each_run(keeper: Bed) -> None:
    """kubernetes 53530: failures of one run do not count for the next."""
    look = ("sh", "-c", f"test ! -e {keeper.run}/dead")
    live = Liveness(command=look, every=0.1, timeout=0.1, failures=3)
    async with node_on(keeper, s=spec(*SLEEP, liveness=live)) as node:
        await node.launch()
        before = await node.state("s", State.RUNNING)
        runner = node.services.runners["s"]
        assert runner.not_alive == ""
        (keeper.run / "dead").touch()
        await until(lambda: bool(runner.not_alive), "three looks")
        assert "looks in a row failed: `sh` left with 1" in runner.not_alive
        (keeper.run / "dead").unlink()
        await until(lambda: not runner.not_alive, "a look that succeeds")
        (keeper.run / "dead").touch()
        await until(lambda: bool(runner.not_alive), "three looks")
        await node.services.restart("s", runner.not_alive, kill=False, pid=before["pid"])
        await node.new_pid("s", before["pid"])
        assert runner.not_alive == ""


async def test_a_service_that_says_it_is_stopping_is_left_to_end_by_itself_and_is_restarted(keeper: Bed) -> None:
    script = f"""
import os, signal, socket, time
signal.signal(signal.SIGTERM, lambda *_: open("{keeper.run}/told", "w").write("SIGTERM"))
time.sleep(0.3)
s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
s.sendto(b"STOPPING=1", os.environ["NOTIFY_SOCKET"])
time.sleep(0.3)
open("{keeper.run}/done", "a").write("done\\n")
"""
    async with node_on(keeper, s=spec(sys.executable, "-c", script)) as node:
        await node.launch()
        before = await node.state("s", State.RUNNING)
        row = await node.state("s", State.STOPPING)
        assert row["why"] == "it said STOPPING=1"
        await node.new_pid("s", before["pid"])
        assert (keeper.run / "done").read_text().startswith("done\n")
        assert not (keeper.run / "told").exists()


async def _come_back(node: NodeBed, name: str, service: Service) -> tuple[NodeBed, "asyncio.Task[None]"]:
    """As after the loss of the supervisor: its runner is gone, and another one adopts what the keeper has."""
    task = node.services._tasks.pop(name)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    hello = await node.bed.call("hello")
    other = NodeBed(node.bed, {name: service}, node.driver, node.folder)
    other.gpus.update(node.gpus)
    monitor = asyncio.create_task(other.services.run())
    await other.services.adopt(1, hello["services"], hello["held"], deadline=soon())
    return other, monitor


async def _end(other: NodeBed, monitor: "asyncio.Task[None]") -> None:
    await other.services.fence_now()
    monitor.cancel()
    await asyncio.gather(monitor, return_exceptions=True)


async def test_a_supervisor_that_finds_sidecars_alone_starts_anew_and_takes_nobody_else_for_them(
    any_keeper: Bed,
) -> None:
    """In weak containment a service is known by its session, and the kernel's own threads have session 0."""
    service = spec(*SLEEP, sidecars={"a": sidecar(*SLEEP, ready_after=1)})
    async with node_on(any_keeper, s=service) as node:
        await node.launch()
        first = await until(lambda: _sidecars(node)["a"]["pid"], "the sidecar")
        found = Footprint.of((await any_keeper.call("hello"))["services"]["s"])
        assert set(found.pids()) <= {first}
        found.close()
        other, monitor = await _come_back(node, "s", service)
        try:
            await other.state("s", State.RUNNING)
            assert not _lives(first)
            assert other.row("s")["failures"] == 0
        finally:
            await _end(other, monitor)


async def test_a_look_of_a_lost_supervisor_that_hangs_is_no_failure_of_its_service(keeper: Bed) -> None:
    """The first look hangs; each later one says that the service is ready."""
    first = keeper.run / "first"
    look = ("sh", "-c", f"test -e {first} && exit 0; touch {first}; exec sleep 1000")
    service = spec(*SLEEP, readiness=Readiness(command=look, timeout=100))
    async with node_on(keeper, s=service) as node:
        await node.launch()
        await until(first.exists, "a look")
        pid = node.row("s")["pid"]
        other, monitor = await _come_back(node, "s", service)
        try:
            assert (await other.state("s", State.RUNNING, seconds=30))["pid"] == pid
        finally:
            await _end(other, monitor)


async def test_sidecars_that_had_to_be_killed_are_followed_by_one_failure_and_a_fresh_start(keeper: Bed) -> None:
    deaf = sidecar("sh", "-c", "trap '' TERM; while :; do sleep 0.1; done")
    second = keeper.run / "second"
    fails = sidecar("sh", "-c", f"test -e {second} && exec sleep 1000; touch {second}; exit 1", ready_after=0.5)
    service = spec(*SLEEP, stop_timeout=0.3, sidecars={"deaf": deaf, "fails": fails})
    async with node_on(keeper, s=service) as node:
        await node.launch()
        assert (await node.state("s", State.RUNNING))["failures"] == 1
        assert not any("SIGKILL" in event for event in node.events)
