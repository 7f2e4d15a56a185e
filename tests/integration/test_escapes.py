"""Services whose processes fork away, close everything, ignore everything: what counts is the cgroup, and its lock."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from supervisor import proc
from supervisor.flock import MutexBusy, take_path
from supervisor.service.states import State
from supervisor.watchdog.round import Watchdog
from supervisor.watchdog.verdict import Kind
from tests.bed.children import child
from tests.bed.keeper import Bed, pid_from, until, wait_for
from tests.bed.nodes import Make, gone
from tests.bed.services import GPUWARD, node_on, shell, spec

SLEEP = "exec sleep 600"
DEAF = "setsid sh -c 'trap \"\" TERM HUP INT; echo $$ > {file}; while :; do sleep 600; done' &"
"""A grandchild in a session of its own that ignores what one asks of it; its pid in a file."""


def lives(pid: int) -> bool:
    return not gone(pid)


def test_stop_with_wait_returns_when_the_last_grandchild_has_ended_and_not_before(make_node: Make) -> None:
    """process-compose 520: `down` returned 0 while grandchildren lived on. Here: double fork, setsid, a deaf one."""
    node = make_node().after_an_orderly_end()
    file = node.folder / "deaf.pid"
    node.add_service("one", "sh", "-c", f"({DEAF.format(file=file)}); {SLEEP}", stop_timeout="300ms")
    node.start().until_leading()
    pid = int(node.until(lambda: file.read_text() if file.exists() else ""))
    assert lives(pid)
    command = [sys.executable, "-m", "supervisor.entry", "service", "stop", "one", "--wait", "--run-dir", str(node.run)]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0
    assert not lives(pid)
    assert node.service_pids() == []


async def test_a_service_that_forks_away_and_exits_0_has_failed_and_its_daemon_never_lives_twice(
    any_keeper: Bed,
) -> None:
    """What it leaves behind is ended before each next start; in the end it is degraded, with nothing left."""
    run = any_keeper.run
    script = f"""
        for pid in $(cat {run}/daemons); do
            grep -qs '^State:.[^ZX]' /proc/$pid/status && echo $pid >> {run}/twice
        done
        setsid sh -c "echo \\$\\$ >> {run}/daemons; touch {run}/up.$$; exec sleep 600" &
        while [ ! -e {run}/up.$$ ]; do sleep 0.01; done
        exit 0
    """
    (run / "daemons").touch()
    async with node_on(any_keeper, away=shell(script, restart={"backoff": (0.05, 0.05, 0.05)})) as node:
        await node.launch()
        row = await node.state("away", State.DEGRADED, seconds=30)
        assert "exited unexpectedly with 0" in row["why"]
        daemons = [int(word) for word in (run / "daemons").read_text().split()]
        assert len(daemons) == 5
        assert not (run / "twice").exists()
        assert not any(map(lives, daemons))


async def test_the_engine_of_a_killed_front_end_is_gone_before_the_next_start(any_keeper: Bed) -> None:
    """vllm 55510: the API process was killed, the engine core kept the GPU while the port was free."""
    run = any_keeper.run
    script = f"""
        [ -s {run}/engine.pid ] && grep -s '^State:.[^ZX]' /proc/$(cat {run}/engine.pid)/status > {run}/left
        setsid sh -c 'exec 9<>{run}/gpu/nvidia0; trap "" TERM; echo $$ > {run}/engine.pid; while :; do sleep 60; done' &
        while [ ! -s {run}/engine.pid ]; do sleep 0.01; done
        {SLEEP}
    """
    llm = shell(script, gpu=0, lock="lifetime")
    async with node_on(any_keeper, llm=llm, next=shell(SLEEP, gpu=0, lock="lifetime", gpu_fd="optional")) as node:
        await node.launch()
        front = (await node.state("llm", State.RUNNING))["pid"]
        engine, _ = await pid_from(run / "engine.pid")
        assert lives(engine)
        os.kill(front, signal.SIGKILL)
        await node.new_pid("llm", front)
        assert not lives(engine)
        await until(lambda: (run / "left").exists() or None, "its second run")
        assert (run / "left").read_text() == ""
        assert not [event for event in any_keeper.events if event["event"] == "lock-free"]
        assert node.row("next")["state"] == "waiting-lock"


async def test_workers_of_a_service_that_is_not_ready_in_time_end_with_it(any_keeper: Bed) -> None:
    """vllm 44751: a start-up time-out orphaned workers."""
    run = any_keeper.run
    workers = "".join(f"({DEAF.format(file=f'{run}/worker{number}')}); " for number in range(3))
    slow = shell(
        f"{workers} {SLEEP}",
        readiness={"notify": True, "timeout": "2s"},
        stop_timeout=0.2,
        restart={"backoff": (600.0,), "window": 600.0},
    )
    async with node_on(any_keeper, slow=slow) as node:
        await node.launch()
        pids = [(await pid_from(run / f"worker{number}"))[0] for number in range(3)]
        assert all(map(lives, pids))
        await until(lambda: node.row("slow")["failures"] or None, "the first failure", 20)
        assert not any(map(lives, pids))
        assert any("not ready within 2 s" in event for event in node.events)


async def test_an_exit_is_seen_at_once_while_a_grandchild_holds_the_output_open(any_keeper: Bed) -> None:
    """cpython PR 151983: asyncio's Process.wait() hangs then. Here a pidfd tells, and nobody reads the output."""
    script = f"({DEAF.format(file=any_keeper.run / 'deaf')}); exit 7"
    await any_keeper.arm(1)
    await any_keeper.start(1, "s", "sh", "-c", script)
    pid, _ = await pid_from(any_keeper.run / "deaf")
    assert await any_keeper.event("exited", service="s", status=7 << 8)
    log = os.stat(any_keeper.run / "s.log")
    assert os.path.samestat(os.stat(f"/proc/{pid}/fd/1"), log)
    assert not [event for event in any_keeper.events if event["event"] == "empty"]


# --- the lock


async def test_a_service_that_closes_every_fd_keeps_its_lock_its_name_and_its_health(any_keeper: Bed) -> None:
    """The keeper's duplicate has the lock; the refusal, the lock file and the status name the service; and the watchdog
    does not take it for one that uses the GPU without its lock."""
    script = (
        "import os, sys, time\n"
        "os.closerange(0, 4096)\n"
        "os.open(sys.argv[1], os.O_RDWR)\n"
        "open(sys.argv[2], 'w').write('done\\n')\n"
        "time.sleep(600)\n"
    )
    run = any_keeper.run
    command = (sys.executable, "-I", "-S", "-c", script, str(run / "gpu" / "nvidia0"), str(run / "done"))
    async with node_on(any_keeper, llm=spec(*command, gpu=0, lock="lifetime")) as node:
        await node.launch()
        await node.file("done")
        pid = (await node.state("llm", State.RUNNING))["pid"]
        assert "gpu-0.lock" not in "".join(os.readlink(fd.path) for fd in os.scandir(f"/proc/{pid}/fd"))
        with pytest.raises(MutexBusy):
            take_path(node.lock_file)
        ask = (GPUWARD, "lock", "run", "--run-dir", str(run), "--gpu", "0", "--", "true")
        async with child(*ask, stderr=asyncio.subprocess.PIPE) as asked:
            refusal = json.loads((await asked.communicate())[1])
        assert (asked.returncode, refusal["holder"]["service"], refusal["holder"]["pid"]) == (75, "llm", pid)
        assert json.loads(node.lock_file.read_text())["holder"]["service"] == "llm"
        watchdog = Watchdog(
            node.services,
            node.driver,
            clock=node.services.clock,
            interval=60.0,
            confirm=0.05,
            lock_files={0: node.lock_file},
            on_event=node.events.append,
        )
        assert [verdict.kind for verdict in await watchdog.round()] == [Kind.HEALTHY]


async def test_a_killed_holder_frees_its_lock_only_when_its_last_child_has_ended(keeper: Bed) -> None:
    """The job's first process is killed, and its child has neither the lock's fd nor the parent's session."""
    run = keeper.run
    script = f"(setsid sh -c 'exec 3>&- 4>&- 5>&- 6>&- 7>&- 8>&- 9>&-; echo $$ > {run}/child; exec sleep 600' &); "
    async with node_on(keeper, llm=shell(SLEEP)) as node:
        await node.launch()
        command = (GPUWARD, "lock", "run", "--run-dir", str(run), "--gpu", "0", "--")
        async with child(*command, "sh", "-c", f"{script} echo $$ > {run}/first; {SLEEP}") as first:
            pid, ticks = await pid_from(run / "first")
            heir = await pid_from(run / "child")
            first.kill()
            assert await first.wait() == -signal.SIGKILL
        assert pid == first.pid
        assert ticks
        async with child(*command, "true", stderr=asyncio.subprocess.DEVNULL) as again:
            assert await again.wait() == 75
        with pytest.raises(MutexBusy):
            take_path(node.lock_file)
        assert proc.kill(*heir)
        await keeper.event("lock-free", gpu=0)
        os.close(take_path(node.lock_file))


GENERATIONS = """
import os, sys
path, depth = sys.argv[1], int(sys.argv[2])
with open(f"{path}.pid{depth}.new", "w") as file:
    file.write(str(os.getpid()))
os.rename(f"{path}.pid{depth}.new", f"{path}.pid{depth}")
if depth < 3:
    code = sys.argv[3]
    os.spawnv(os.P_NOWAIT, sys.executable, [sys.executable, "-I", "-S", "-c", code, path, str(depth + 1), code])
os.read(0, 1)
"""


def test_a_lock_inherited_through_three_generations_is_free_when_the_last_of_them_has_ended(tmp_path: Path) -> None:
    """airlift PR 834: each generation has it by fork and exec; the first two end, in either order, and it stays."""
    path = tmp_path / "gpu.lock"
    wait, go_on = os.pipe()
    code = [sys.executable, "-I", "-S", "-c", GENERATIONS, str(path), "1", GENERATIONS]
    command = [GPUWARD, "lock", "run", "--path", str(path), "--", *code]
    pids: list[tuple[int, int]] = []
    with subprocess.Popen(command, stdin=wait, stderr=subprocess.DEVNULL) as first:
        try:
            for depth in (1, 2, 3):
                file = tmp_path / f"gpu.lock.pid{depth}"
                wait_for(file.exists, f"generation {depth}", 20)
                found = proc.stat(int(file.read_text()))
                assert found is not None
                pids.append((found.pid, found.start_ticks))
            assert first.pid == pids[0][0]
            for pid, ticks in (pids[1], pids[0]):
                assert proc.kill(pid, ticks)
                wait_for(lambda pid=pid: gone(pid), f"the end of {pid}")  # type: ignore[misc]
                with pytest.raises(MutexBusy):
                    take_path(path)
        finally:
            os.close(go_on)
            os.close(wait)
            for pid, ticks in pids[:2]:
                proc.kill(pid, ticks)
    wait_for(lambda: free(path), "the lock to be free")


def free(path: Path) -> bool:
    with contextlib.suppress(MutexBusy):
        os.close(take_path(path))
        return True
    return False
