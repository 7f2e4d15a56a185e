"""Ends and looks at their edges: each case here once killed, or left untold, what it should not have."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from election.clock import BootClock, boot_time
from supervisor import foreign, proc
from supervisor.cgroup import Group
from supervisor.config.schema import Gpu
from supervisor.config.service import Liveness, Readiness, Sidecar
from supervisor.gpu.holders import DeviceId, Hold
from supervisor.gpu.simulated import SimulatedDriver
from supervisor.keeper.weak import WeakTerm
from supervisor.service import hand
from supervisor.service.order import make_sidecar_order
from supervisor.service.requests import Verb
from supervisor.service.states import State
from tests.bed.keeper import Bed, until
from tests.bed.services import node_on, spec

SLEEP = ("sleep", "1000")
SAYS_STOPPING = """
import os, signal, socket, time
def stop(*_):
    socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(b"STOPPING=1", os.environ["NOTIFY_SOCKET"])
    time.sleep(0.3)
    os._exit(0)
signal.signal(signal.SIGUSR1, stop)
open(os.environ["GPUWARD_RUN_DIR"] + "/armed", "w").close()
while True:
    time.sleep(0.05)
"""


def _polite(run: Path) -> Sidecar:
    """It notes its SIGTERM, once `listens` is there."""
    script = f"trap 'echo TERM > {run}/told; exit 0' TERM; : > {run}/listens; while :; do sleep 0.05; done"
    return Sidecar(command=("sh", "-c", script), ready_after=0.1)


def _ended() -> "subprocess.Popen[bytes]":
    return subprocess.Popen(["true"])


def _lives(pid: int) -> bool:
    found = proc.stat(pid)
    return found is not None and found.state not in "ZX"


@pytest.mark.parametrize("drains", [True, False])
async def test_once_a_service_that_said_stopping_has_ended_its_sidecars_are_told_and_not_waited_for(
    keeper: Bed, drains: bool
) -> None:
    service = spec(
        sys.executable,
        "-c",
        SAYS_STOPPING,
        stop_timeout=60,
        drain_signal="USR1",
        sidecars={"proxy": _polite(keeper.run)},
    )
    async with node_on(keeper, s=service) as node:
        await node.launch()
        before = await node.state("s", State.RUNNING)
        await until((keeper.run / "armed").exists, "its handler")
        await until((keeper.run / "listens").exists, "the sidecar's handler")
        if drains:
            await node.services.request("s", Verb.DRAIN, no_start="")
            await node.state("s", State.STOPPED, seconds=30)
        else:
            await keeper.call("signal", service="s", unit="main", signal=10)
            await node.new_pid("s", before["pid"])
        assert (keeper.run / "told").exists()


async def test_a_signal_for_the_inside_of_a_container_spares_the_sidecars_and_a_stop_reaches_them(keeper: Bed) -> None:
    """A real cgroup, with a stand-in for the client and for what it runs."""
    sidecars = {"proxy": _polite(keeper.run)}
    async with node_on(keeper, s=spec(*SLEEP, drain_signal="USR1", stop_timeout=5, sidecars=sidecars)) as node:
        await node.launch()
        row = await node.state("s", State.RUNNING)
        await until((keeper.run / "listens").exists, "the sidecar's handler")
        runner = node.services.runners["s"]
        inside = await asyncio.create_subprocess_exec(*SLEEP)
        footprint: Any = runner.hand.footprint
        cgroup = Group.open(footprint.cgroup)
        container = cgroup.make("0123456789ab")
        container.enter(inside.pid)
        runner.hand._runtime = object()  # type: ignore[assignment]
        await runner.hand.drain()
        assert await inside.wait() == -10
        container.close()
        cgroup.close()
        assert _lives(row["sidecars"][0]["pid"])
        assert _lives(row["pid"])
        await node.services.request("s", Verb.STOP, no_start="")  # nothing runs inside: client and sidecar are told
        await until((keeper.run / "told").exists, "the sidecar's SIGTERM")
        runner.hand._runtime = None
        await until(lambda: not _lives(row["pid"]), "the end of the client")
        await node.state("s", State.STOPPED)


async def test_what_is_told_of_a_drain_that_a_sidecar_has_cut_short_is_true(keeper: Bed) -> None:
    async with node_on(keeper, s=spec(*SLEEP, sidecars={"proxy": Sidecar(command=SLEEP, ready_after=0.1)})) as node:
        await node.launch()
        row = await node.state("s", State.RUNNING)
        await node.services.request("s", Verb.DRAIN, no_start="")
        await node.state("s", State.DRAINING)
        os.kill(row["sidecars"][0]["pid"], signal.SIGKILL)
        await node.state("s", State.STOPPED)
        assert any("sidecar proxy: ended by SIGKILL" in event for event in node.events)


async def test_a_stop_between_two_sidecars_tells_the_first_one(keeper: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    real, asked = make_sidecar_order, []

    def slow(name: str, side: str, *args: Any, **more: Any) -> Any:
        asked.append(side)
        if side == "second":
            time.sleep(1)  # a directory server that takes a moment
        return real(name, side, *args, **more)

    monkeypatch.setattr(hand, "make_sidecar_order", slow)
    sidecars = {"first": _polite(keeper.run), "second": Sidecar(command=SLEEP)}
    async with node_on(keeper, s=spec(*SLEEP, sidecars=sidecars)) as node:
        await node.launch()
        await until(lambda: "second" in asked, "the second one")
        await node.services.request("s", Verb.STOP, no_start="")
        await node.state("s", State.STOPPED)
        assert (keeper.run / "told").exists()


async def test_why_a_service_cannot_be_looked_at_is_told_and_kills_nothing_that_runs(keeper: Bed) -> None:
    env = keeper.run / "env"
    env.write_text("A=1\n")
    live = Liveness(command=("false",), every=0.2, timeout=0.2)
    async with node_on(keeper, s=spec(*SLEEP, env_file=env, liveness=live, ready_after=0.5)) as node:
        await node.launch()
        await until(lambda: node.row("s")["pid"], "its pid")
        env.unlink()
        await node.state("s", State.RUNNING)
        await until(lambda: any("cannot be looked at: env_file" in event for event in node.events), "the reason")
        assert node.services.runners["s"].not_alive == ""


async def test_a_service_that_cannot_be_looked_at_as_it_is_configured_fails_with_the_reason(keeper: Bed) -> None:
    env = keeper.run / "env"
    env.write_text("A=1\n")
    async with node_on(
        keeper, s=spec(*SLEEP, env_file=env, readiness=Readiness(command=("false",), timeout=3))
    ) as node:
        await node.launch()
        await until(lambda: node.row("s")["pid"], "its pid")
        env.unlink()
        await until(lambda: any("not ready within" in event for event in node.events), "the failure")
        assert any("env_file" in event for event in node.events if "not ready within" in event)


async def test_a_look_whose_end_may_have_been_told_to_nobody_counts_for_nothing(keeper: Bed) -> None:
    live = Liveness(command=("sh", "-c", f"touch {keeper.run}/looks; exec sleep 1000"), every=1, timeout=1, failures=1)
    async with node_on(keeper, s=spec(*SLEEP, liveness=live)) as node:
        await node.launch()
        await until((keeper.run / "looks").exists, "a look")
        node.services.messages_lost()  # as when the keeper is replaced
        await until(lambda: any("may have been told to nobody" in event for event in node.events), "its end")
        assert node.services.runners["s"].not_alive == ""
        await until(lambda: bool(node.services.runners["s"].not_alive), "the next look, which counts")


@pytest.mark.parametrize("policy", ["refuse", "terminate"])
@pytest.mark.parametrize("reaped", [True, False])
async def test_who_has_ended_since_the_look_is_in_nobodys_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: Any, reaped: bool
) -> None:
    """nvidia-smi lives for some milliseconds."""
    driver = SimulatedDriver(tmp_path / "gpu")
    facts = await driver.facts(deadline=boot_time() + 5)
    looks: list[DeviceId] = []
    with _ended() as ended:
        await until(lambda: proc.is_over(ended.pid), "its end")
        if reaped:
            ended.wait()

        def holders(device: DeviceId) -> dict[int, Hold]:
            looks.append(device)
            return {ended.pid: Hold.HELD} if len(looks) == 1 else {}

        monkeypatch.setattr(foreign, "holders", holders)
        strangers = foreign.Foreign(
            Gpu(driver="simulated", foreign=policy), driver, BootClock(), lambda _: None, lambda *_: None
        )
        await strangers.clear(facts, by=boot_time() + 10)
    assert looks


def test_looks_leave_nothing_behind_in_weak_containment() -> None:
    term = WeakTerm(1)
    box = term.service("s")
    box.started(1000, None)
    for pid in range(2000, 3000):
        box.started(pid, "look-ready")
    assert len(term.mains) == 2
