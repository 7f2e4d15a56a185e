"""The watchdog on real processes, a real keeper and device files that are really open."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from election.clock import BootClock, boot_time
from supervisor import proc
from supervisor.cgroup import Group
from supervisor.config.service import Service
from supervisor.service.footprint import Footprint
from supervisor.service.states import State
from supervisor.watchdog import round as module
from supervisor.watchdog.round import Watchdog
from supervisor.watchdog.verdict import Kind, Verdict
from tests.bed.keeper import PATIENCE, Bed, pid_from, until
from tests.bed.services import GPUWARD, NodeBed, node_on, shell

CONFIRM = 0.1
OPEN = "exec 9<>{device}; echo $$ > {run}/{name}; exec sleep 600"


def watchdog_of(node: NodeBed, interval: float = 60.0) -> Watchdog:
    return Watchdog(
        node.services,
        node.driver,
        clock=node.services.clock,
        interval=interval,
        confirm=CONFIRM,
        lock_files={0: node.lock_file},
        on_event=node.events.append,
    )


def device_of(bed: Bed) -> Path:
    return bed.run / "gpu" / "nvidia0"


def holder_of(bed: Bed, **fields: object) -> Service:
    """A lifetime service whose one process opens the device at once, and closes it when it gets SIGUSR1."""
    script = (
        "import os, signal, sys, time\n"
        "fd = os.open(sys.argv[1], os.O_RDWR)\n"
        "signal.signal(signal.SIGUSR1, lambda *_: os.close(fd))\n"
        "print('open', flush=True)\n"
        "while True: time.sleep(600)\n"
    )
    given: dict[str, object] = {"gpu": 0, "lock": "lifetime"} | fields
    return shell(f'exec {sys.executable} -I -S -c "$0" {device_of(bed)}', **given).model_copy(
        update={"command": (sys.executable, "-I", "-S", "-c", script, str(device_of(bed)))}
    )


@asynccontextmanager
async def holding(bed: Bed) -> AsyncIterator[tuple[NodeBed, int]]:
    """A node with a service `llm` that has its device open, and its pid."""
    async with node_on(bed, llm=holder_of(bed)) as node:
        await node.launch()
        pid = (await node.state("llm", State.RUNNING))["pid"]
        await until(lambda: "open" in (bed.run / "llm.log").read_text() or None, "the device to be open")
        yield node, pid


class Ahead(BootClock):
    """The real clock, and some seconds."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def now(self) -> float:
        return super().now() + self.seconds

    async def sleep_until(self, deadline: float) -> None:
        await super().sleep_until(deadline - self.seconds)


def only(verdicts: list[Verdict]) -> Verdict:
    (verdict,) = verdicts
    return verdict


async def test_a_service_that_holds_its_device_is_left_alone(any_keeper: Bed) -> None:
    async with holding(any_keeper) as (node, pid):
        watchdog = watchdog_of(node)
        for _ in range(3):
            assert only(await watchdog.round()).kind is Kind.HEALTHY
        assert node.row("llm")["pid"] == pid


async def test_a_service_that_has_lost_its_device_is_killed_and_restarted(any_keeper: Bed) -> None:
    """vllm 55510 and its kind: the process lives, the GPU is gone from it."""
    async with holding(any_keeper) as (node, pid):
        watchdog = watchdog_of(node)
        await watchdog.round()
        os.kill(pid, signal.SIGUSR1)
        await until(lambda: len(os.listdir(f"/proc/{pid}/fd")) == 4 or None, "the device to be closed")
        verdict = only(await watchdog.round())
        assert (verdict.kind, verdict.confirmed) == (Kind.LOST_GPU, True)
        second = await node.new_pid("llm", pid)
        assert proc.stat(pid) is None
        assert node.row("llm")["failures"] == 1
        assert second != pid


async def test_one_look_is_never_enough(keeper: Bed) -> None:
    async with holding(keeper) as (node, pid):
        watchdog = watchdog_of(node)
        await watchdog.round()
        os.kill(pid, signal.SIGUSR1)
        await until(lambda: len(os.listdir(f"/proc/{pid}/fd")) == 4 or None, "the device to be closed")
        first = only(await watchdog._look(frozenset()))
        assert (first.kind, first.confirmed) == (Kind.LOST_GPU, False)
        assert node.row("llm")["pid"] == pid


async def test_a_device_held_by_a_child_counts(any_keeper: Bed) -> None:
    """mxnet 4242: the parent has nothing open, the child has the GPU."""
    child = f"(exec 9<>{device_of(any_keeper)}; echo $$ > {any_keeper.run}/child.pid; exec sleep 600) & wait"
    async with node_on(any_keeper, llm=shell(child, gpu=0, lock="lifetime", start_grace=0.0)) as node:
        await node.launch()
        await node.state("llm", State.RUNNING)
        await pid_from(any_keeper.run / "child.pid")
        watchdog = watchdog_of(node)
        assert only(await watchdog.round()).kind is Kind.HEALTHY


async def test_a_service_that_never_opens_its_device_fails_at_the_end_of_its_grace(keeper: Bed) -> None:
    """docs/services.md: `gpu_fd: required` and no device by the end of `start_grace`."""
    async with node_on(keeper, llm=shell("exec sleep 600", gpu=0, lock="lifetime", start_grace=600.0)) as node:
        await node.launch()
        pid = (await node.state("llm", State.RUNNING))["pid"]
        watchdog = watchdog_of(node)
        assert only(await watchdog.round()).kind is Kind.HEALTHY
        watchdog._clock = Ahead(600.0)
        assert only(await watchdog.round()).kind is Kind.NO_GPU
        await node.new_pid("llm", pid)


async def test_what_cannot_be_read_is_never_lost(keeper: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    async with holding(keeper) as (node, pid):
        watchdog = watchdog_of(node)
        await watchdog.round()
        real = os.listdir

        def denied(path: str) -> list[str]:
            if str(path).endswith("/fd"):
                raise PermissionError(13, "Permission denied", path)
            return real(path)

        monkeypatch.setattr(os, "listdir", denied)
        assert only(await watchdog.round()).kind is Kind.UNKNOWN
        assert node.row("llm")["pid"] == pid


async def test_a_frozen_service_is_left_alone(keeper: Bed) -> None:
    async with holding(keeper) as (node, pid):
        watchdog = watchdog_of(node)
        await watchdog.round()
        os.kill(pid, signal.SIGUSR1)
        await until(lambda: len(os.listdir(f"/proc/{pid}/fd")) == 4 or None, "the device to be closed")
        footprint = node.services.runners["llm"].hand.footprint
        assert footprint is not None
        assert footprint.cgroup is not None
        group = Group.open(footprint.cgroup)
        group.freeze()
        try:
            await until(lambda: footprint.frozen() or None, "the freeze")
            assert only(await watchdog.round()).kind is Kind.UNKNOWN
            assert node.row("llm")["pid"] == pid
        finally:
            group._write("cgroup.freeze", "0")
            group.close()


async def test_a_death_that_nobody_told_is_found(keeper: Bed) -> None:
    """The keeper's event is lost, say because the keeper was replaced: the round finds it."""
    async with holding(keeper) as (node, pid):
        keeper.client.on_event = lambda event: node.services.keeper_event(event) if event["event"] == "empty" else None
        watchdog = watchdog_of(node)
        os.kill(pid, signal.SIGKILL)
        await until(lambda: proc.stat(pid) is None or None, "its end")
        verdict = only(await watchdog.round())
        assert (verdict.kind, verdict.confirmed) == (Kind.DEAD, True)
        await node.new_pid("llm", pid)


async def test_the_device_without_the_mutex_costs_a_process_its_life_and_nobody_else(
    any_keeper: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """docs/services.md: TERM, 10 s, KILL."""
    monkeypatch.setattr(module, "TERM_WAIT", 0.3)
    deaf = f"(trap '' TERM; exec 9<>{device_of(any_keeper)}; exec sleep 600)"
    thief = f"{deaf} & echo $! > {any_keeper.run}/thief.pid; wait; exec sleep 600"
    async with node_on(any_keeper, worker=shell(thief, gpu=0, lock="on-demand")) as node:
        await node.launch()
        main = (await node.state("worker", State.RUNNING))["pid"]
        pid, _ = await pid_from(any_keeper.run / "thief.pid")
        await until(lambda: Path(f"/proc/{pid}/fd/9").exists() or None, "the device to be open")
        watchdog = watchdog_of(node)
        verdict = only(await watchdog.round())
        assert (verdict.kind, verdict.confirmed, verdict.offenders[0][0]) == (Kind.DEVICE_WITHOUT_MUTEX, True, pid)
        await until(lambda: any(f"SIGTERM to {pid}" in event for event in node.events) or None, "a SIGTERM")
        await until(lambda: any(f"SIGKILL to {pid}" in event for event in node.events) or None, "a SIGKILL")
        await until(lambda: proc.stat(pid) is None or None, "its end")
        assert node.row("worker")["pid"] == main


async def test_who_lets_go_of_the_device_after_the_sigterm_is_not_killed(
    keeper: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TERM_WAIT", 5.0)  # it needs a moment to let go
    script = (
        "import os, signal, sys, time\n"
        "fd = os.open(sys.argv[1], os.O_RDWR)\n"
        "signal.signal(signal.SIGTERM, lambda *_: os.close(fd))\n"
        "print('open', flush=True)\n"
        "while True: time.sleep(600)\n"
    )
    command = (sys.executable, "-I", "-S", "-c", script, str(device_of(keeper)))
    worker = shell("true", gpu=0, lock="on-demand").model_copy(update={"command": command})
    async with node_on(keeper, worker=worker) as node:
        await node.launch()
        await until(lambda: "open" in (keeper.run / "worker.log").read_text() or None, "the device to be open")
        pid = (await node.state("worker", State.RUNNING))["pid"]
        watchdog = watchdog_of(node)
        await watchdog.round()
        (chase,) = watchdog._actions
        await chase
        assert any("SIGTERM" in event for event in node.events)
        assert not any("SIGKILL" in event for event in node.events)
        assert node.row("worker")["pid"] == pid


async def test_a_job_with_the_mutex_may_use_the_device(any_keeper: Bed) -> None:
    """Also where its child has closed the inherited lock: the keeper's duplicate keeps it for the whole job."""
    inner = f"exec 9<>{device_of(any_keeper)}; echo $$ > {any_keeper.run}/job.pid; exec sleep 600"
    parent = f'import subprocess; subprocess.run(["sh", "-c", "{inner}"])'
    job = f"{GPUWARD} lock run --gpu 0 -- {sys.executable} -c '{parent}'"
    async with node_on(any_keeper, worker=shell(f"{job}; exec sleep 600", gpu=0, lock="on-demand")) as node:
        await node.launch()
        await node.state("worker", State.RUNNING)
        pid, _ = await pid_from(any_keeper.run / "job.pid")
        await until(lambda: Path(f"/proc/{pid}/fd/9").exists() or None, "the device to be open")
        watchdog = watchdog_of(node)
        assert only(await watchdog.round()).kind is Kind.HEALTHY
        assert proc.stat(pid) is not None


async def test_the_mutex_taken_by_plain_flock_counts(keeper: Bed) -> None:
    """The holder is who has the flock (docs/services.md), whichever tool took it."""
    script = f"exec 8<>{keeper.run}/gpu-0.lock; flock -n 8 || exit 1; " + OPEN.format(
        device=device_of(keeper), run=keeper.run, name="own.pid"
    )
    async with node_on(keeper, worker=shell(script, gpu=0, lock="on-demand")) as node:
        await node.launch()
        await pid_from(keeper.run / "own.pid")
        watchdog = watchdog_of(node)
        assert only(await watchdog.round()).kind is Kind.HEALTHY


async def test_a_stopped_supervisor_kills_nothing_healthy_when_it_goes_on(keeper: Bed) -> None:
    """patroni PR 2969: SIGSTOP of the supervisor for several rounds, then SIGCONT."""
    supervisor = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.bed.watched", str(keeper.run), stdout=asyncio.subprocess.PIPE
    )
    assert supervisor.stdout is not None

    async def told(what: str, least: int) -> dict[str, int]:
        assert supervisor.stdout is not None
        async with asyncio.timeout(PATIENCE):
            while True:
                line: dict[str, int] = json.loads(await supervisor.stdout.readline())
                if line[what] >= least:
                    return line

    try:
        before = await told("rounds", 2)
        supervisor.send_signal(signal.SIGSTOP)
        await asyncio.sleep(module.OVERSLEPT + 0.5)  # the length of the stop is what is tested
        supervisor.send_signal(signal.SIGCONT)
        await told("skipped", 1)
        after = await told("rounds", before["rounds"] + 3)
        assert after["pid"] == before["pid"]
        assert proc.stat(after["pid"]) is not None
    finally:
        supervisor.kill()
        await supervisor.wait()
        await keeper.reconnect()


async def test_another_fault_at_the_second_look_confirms_nothing(keeper: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    async with holding(keeper) as (node, pid):
        watchdog = watchdog_of(node)
        main = (pid, 0)
        looks = [[Verdict("llm", kind, "made up", main)] for kind in (Kind.LOST_GPU, Kind.DEAD)]

        async def look(_: frozenset[int]) -> list[Verdict]:
            return looks.pop(0)

        monkeypatch.setattr(watchdog, "_look", look)
        assert only(await watchdog.round()).kind is Kind.DEAD
        monkeypatch.undo()
        assert only(await watchdog.round()).kind is Kind.HEALTHY
        assert node.row("llm")["pid"] == pid


async def test_a_gap_between_the_two_looks_of_a_round_voids_it(keeper: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that jumps between first and second look."""
    async with holding(keeper) as (node, pid):
        watchdog = watchdog_of(node)
        await watchdog.round()
        os.kill(pid, signal.SIGUSR1)
        await until(lambda: len(os.listdir(f"/proc/{pid}/fd")) == 4 or None, "the device to be closed")
        real = watchdog._clock

        class Late:
            """Wakes its sleepers three rounds too late."""

            gone = 0.0

            def now(self) -> float:
                return real.now() + self.gone

            def wall(self) -> float:
                return real.wall()

            async def sleep_until(self, deadline: float) -> None:
                await real.sleep_until(deadline)
                self.gone = 180.0

        monkeypatch.setattr(watchdog, "_clock", Late())
        assert await watchdog.round() == []
        assert watchdog.skipped == 1
        assert node.row("llm")["pid"] == pid
        assert any("late" in event for event in node.events)


async def test_rounds_come_by_themselves_and_show_life(keeper: Bed) -> None:
    async with holding(keeper) as (node, _):
        watchdog = watchdog_of(node, interval=0.2)
        running = asyncio.create_task(watchdog.run())
        try:
            first = watchdog.life
            await until(lambda: watchdog.rounds >= 2 or None, "two rounds")
            await until(lambda: watchdog.life > first or None, "a sign of life")
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


async def test_a_round_that_hangs_shows_no_life(keeper: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    """swarmkit 1658: a deadlocked leader kept renewing. rule 4: only while main loop and watchdog live."""
    monkeypatch.setattr(module, "LOOK_LIMIT", 0.1)
    monkeypatch.setattr(module, "OVERSLEPT", 0.5)
    async with node_on(keeper) as node:
        watchdog = watchdog_of(node, interval=0.1)

        async def hangs() -> list[Verdict]:
            await asyncio.Event().wait()
            return []

        monkeypatch.setattr(watchdog, "round", hangs)
        running = asyncio.create_task(watchdog.run())
        try:
            await until(lambda: boot_time() - watchdog.life > 1.0 or None, "no more signs of life")
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


async def test_a_round_that_breaks_is_told_and_the_next_one_comes(keeper: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    async with holding(keeper) as (node, _):
        watchdog = watchdog_of(node, interval=0.1)

        async def breaks(*_: object) -> list[Verdict]:
            raise RuntimeError("made up")

        monkeypatch.setattr(watchdog, "_look", breaks)
        running = asyncio.create_task(watchdog.run())
        try:
            await until(lambda: watchdog.rounds >= 2 or None, "two rounds")
            assert any("made up" in event for event in node.events)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


async def test_a_look_that_blocks_is_left_behind(keeper: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    """gpud 117: a process stuck in the kernel must not block the checks of all the others for ever."""
    released = asyncio.Event()
    loop = asyncio.get_running_loop()

    def blocks(self: Footprint) -> list[int]:
        asyncio.run_coroutine_threadsafe(released.wait(), loop).result(30)
        return []

    async with holding(keeper) as (node, pid):
        with monkeypatch.context() as patch:
            patch.setattr(module, "LOOK_LIMIT", 0.2)
            patch.setattr(Footprint, "pids", blocks)
            watchdog = watchdog_of(node)
            assert await watchdog.round() == []
            assert await watchdog.round() == []
        assert any("no answer by the deadline" in event for event in node.events)
        assert node.row("llm")["pid"] == pid
        released.set()
        await until(lambda: watchdog._lane.stuck == 0 or None, "the thread to come back")
        assert only(await watchdog.round()).kind is Kind.HEALTHY
