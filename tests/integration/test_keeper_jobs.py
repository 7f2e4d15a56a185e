"""Jobs of `gpuward lock run` and `gpu_lock`: fenced, and never two holders."""

import asyncio
import contextlib
import fcntl
import json
import os
import signal
import socket
import sys
from typing import Any

import pytest

from election.clock import boot_time
from election.timing import KILL_TIME, TICK
from supervisor import proc
from supervisor.flock import MutexBusy, take_path
from supervisor.keeper.client import KeeperRefused
from supervisor.keeper.protocol import JOB_SOCKET
from tests.bed.children import ROOT, child
from tests.bed.keeper import Bed, ended, pid_from, until


class Result:
    """What a `gpuward lock run` said."""

    def __init__(self, code: int | None, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def refusal(self) -> dict[str, Any]:
        """The one JSON line."""
        found = json.loads(self.err)
        assert isinstance(found, dict)
        return found


def _command(bed: Bed, *argv: str) -> list[str]:
    return [sys.executable, "-m", "supervisor.entry", "lock", "run", "--run-dir", str(bed.run), *argv]


def _begun(bed: Bed, *argv: str) -> contextlib.AbstractAsyncContextManager[asyncio.subprocess.Process]:
    return child(*_command(bed, *argv), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE)


async def _lock_run(bed: Bed, *argv: str) -> Result:
    async with _begun(bed, *argv) as process:
        out, err = await process.communicate()
    return Result(process.returncode, out.decode(), err.decode())


async def test_a_job_becomes_its_command_in_a_fenced_group_and_ends_with_the_term(keeper: Bed) -> None:
    deadline = await keeper.arm(1, 5.0)
    await keeper.give_lock(1)
    file = keeper.run / "job"
    script = f"cat /proc/self/cgroup; echo $$ > {file}; sleep 600; :"
    async with _begun(keeper, "--gpu", "0", "--", "sh", "-c", script) as job:
        pid, ticks = await pid_from(file)
        assert pid == job.pid  # no wrapper process stays
        taken = await keeper.event("lock-taken", gpu=0)
        assert (taken["holder"]["pid"], taken["holder"]["token"]) == (pid, 1)
        assert 0 <= await ended(pid, ticks) - deadline <= TICK + KILL_TIME
        assert job.stdout is not None
        assert f"0::{keeper.cgroup}/term-1/jobs/job-1\n" in (await job.stdout.read()).decode()


async def test_a_job_of_a_service_stands_below_its_service_and_dies_with_it(keeper: Bed) -> None:
    await keeper.arm(1)
    await keeper.give_lock(1)
    file = keeper.run / "job"
    command = _command(keeper, "--gpu", "0", "--", "sh", "-c", f"echo $$ > {file}; sleep 600; :")
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)}
    await keeper.start(1, "s", "sh", "-c", " ".join(map(_quoted, command)) + "; sleep 600", env=env)
    pid, ticks = await pid_from(file)
    assert proc.cgroup_path(pid) == f"{keeper.cgroup}/term-1/s/job-1"
    taken = await keeper.event("lock-taken", gpu=0)
    assert taken["holder"]["service"] == "s"
    await keeper.call("kill", service="s")
    await ended(pid, ticks)
    await keeper.event("lock-free", gpu=0)


def _quoted(word: str) -> str:
    return "'" + word.replace("'", "'\\''") + "'"


async def test_a_second_taker_is_told_at_once_who_has_it(any_keeper: Bed) -> None:
    await any_keeper.arm(7)
    path = await any_keeper.give_lock(7)
    service = await any_keeper.start(7, "llm", "sleep", "600", lock=0)
    for result in (
        await _lock_run(any_keeper, "--gpu", "0", "--", "true"),
        await _lock_run(any_keeper, "--path", str(path), "--", "true"),
    ):
        assert result.code == 75
        assert result.refusal["reason"] == "busy"
        assert result.refusal["holder"]["pid"] in (service["pid"], any_keeper.pid)
    first = (await _lock_run(any_keeper, "--gpu", "0", "--", "true")).refusal["holder"]
    assert (first["service"], first["pid"], first["token"]) == ("llm", service["pid"], 7)
    assert first["since"] > 0


async def test_without_authority_there_is_no_lock(any_keeper: Bed) -> None:
    result = await _lock_run(any_keeper, "--gpu", "0", "--", "true")
    assert (result.code, result.refusal["reason"]) == (75, "no-authority")
    await any_keeper.arm(1, 5.0)
    await any_keeper.give_lock(1)
    unknown = await _lock_run(any_keeper, "--gpu", "5", "--", "true")
    assert (unknown.code, unknown.refusal["reason"]) == (64, "no-such-gpu")
    await any_keeper.event("fired", token=1)
    result = await _lock_run(any_keeper, "--gpu", "0", "--", "true")
    assert (result.code, result.refusal["reason"]) == (75, "no-authority")


async def test_a_keeper_that_overslept_lets_no_job_in_after_the_deadline(keeper: Bed) -> None:
    """The request waits beside the timer when it wakes: the deadline is looked at for each request."""
    deadline = await keeper.arm(1, 1.0)
    await keeper.give_lock(1)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as caller:
        caller.connect(str(keeper.run / JOB_SOCKET))
        await keeper.call("hello")  # the connection is accepted
        os.kill(keeper.pid, signal.SIGSTOP)
        caller.send(json.dumps({"op": "enter", "gpu": 0, "command": "", "mode": "exec"}).encode())
        await asyncio.sleep(max(deadline - boot_time(), 0) + 0.05)
        os.kill(keeper.pid, signal.SIGCONT)
        assert json.loads(await asyncio.to_thread(caller.recv, 65536))["reason"] == "no-authority"


async def test_a_child_that_outlives_its_job_keeps_the_lock(keeper: Bed) -> None:
    """Also when it has closed the fd: the keeper's duplicate stays until the group is empty."""
    await keeper.arm(1)
    path = await keeper.give_lock(1)
    file = keeper.run / "child"
    script = (
        f"exec 3>&- 4>&- 5>&- 6>&- 7>&- 8>&- 9>&-; (setsid sh -c 'echo $$ > {file}; exec sleep 600' >&- 2>&- &); exit 0"
    )
    assert (await _lock_run(keeper, "--gpu", "0", "--", "sh", "-c", script)).code == 0
    pid, ticks = await pid_from(file)
    assert (await _lock_run(keeper, "--gpu", "0", "--", "true")).refusal["reason"] == "busy"
    with pytest.raises(MutexBusy):
        take_path(path)
    proc.kill(pid, ticks)
    await keeper.event("lock-free", gpu=0)
    assert (await _lock_run(keeper, "--gpu", "0", "--", "true")).code == 0


async def test_a_service_that_closes_all_its_fds_keeps_the_lock(keeper: Bed) -> None:
    await keeper.arm(1)
    path = await keeper.give_lock(1)
    script = "exec 3>&-; ls -l /proc/$$/fd; exec sleep 600"
    started = await keeper.start(1, "s", "sh", "-c", script, lock=0)
    await until(lambda: (found := proc.stat(started["pid"])) is not None and found.comm == "sleep", "exec")
    assert "gpu-0.lock" not in (keeper.run / "s.log").read_text()
    with pytest.raises(MutexBusy):
        take_path(path)
    await keeper.call("kill", service="s")
    await keeper.event("empty", service="s")
    with pytest.raises(MutexBusy):  # kept through kill and restart
        take_path(path)
    await keeper.start(1, "s", "sleep", "600", lock=0)
    await keeper.call("kill", service="s")
    await until(lambda: sum(event["event"] == "empty" for event in keeper.events) == 2, "empty again")
    await keeper.call("release", service="s")
    os.close(take_path(path))


@pytest.mark.parametrize("how", ["deleted", "replaced"])
async def test_no_second_holder_when_the_lock_file_is_deleted_or_replaced_while_held(any_keeper: Bed, how: str) -> None:
    """filelock 27, portalocker 115."""
    from supervisor import mutex

    await any_keeper.arm(1)
    lock = mutex.create(any_keeper.run / "gpu-0.lock", token=1, node="n")
    try:
        await any_keeper.call("locks", fds=(lock.fd,), token=1, locks=[{"gpu": 0, "path": str(lock.path)}])
        await any_keeper.start(1, "s", "sleep", "600", lock=0)
        lock.path.unlink()
        if how == "replaced":
            lock.path.touch()
        for argv in (["--gpu", "0"], ["--path", str(lock.path)]):
            result = await _lock_run(any_keeper, *argv, "--", "true")
            assert (result.code, result.refusal["reason"]) == (75, "busy")
        assert how in str(lock.repair())
        with pytest.raises(MutexBusy):
            take_path(lock.path)
        assert lock.repair() is None
    finally:
        lock.close()


async def test_the_path_of_a_configured_lock_counts_as_its_gpu(keeper: Bed) -> None:
    await keeper.arm(1)
    path = await keeper.give_lock(1)
    (keeper.run / "locks.json").write_text(json.dumps({"0": {"path": str(path)}}))
    link = keeper.run / "another-name"
    link.symlink_to(path)
    for name in (path, link):
        result = await _lock_run(keeper, "--path", str(name), "--", "cat", "/proc/self/cgroup")
        assert (result.code, result.err) == (0, "")
        assert f"{keeper.cgroup}/term-1/jobs/job-" in result.out
    result = await _lock_run(keeper, "--path", str(keeper.run / "other"), "--", "true")
    assert result.code == 0
    assert "not fenced" in result.err


_SCOPE = """
import os, sys
from supervisor.mutex import gpu_lock, GpuBusy, NoAuthority
try:
    with gpu_lock(0, run=sys.argv[1]):
        print("in", os.getpid(), flush=True)
        sys.stdin.readline()
    print("out", open("/proc/self/cgroup").read().split("0::")[1].strip(), flush=True)
    sys.stdin.readline()
except (GpuBusy, NoAuthority) as error:
    print(type(error).__name__, getattr(error, "holder", None), flush=True)
"""


def _scope(bed: Bed) -> contextlib.AbstractAsyncContextManager[asyncio.subprocess.Process]:
    command = (sys.executable, "-c", _SCOPE, str(bed.run))
    return child(*command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE)


async def test_gpu_lock_frees_the_lock_at_the_end_of_its_block_and_stays_fenced(keeper: Bed) -> None:
    deadline = await keeper.arm(1, 8.0)
    path = await keeper.give_lock(1)
    async with _scope(keeper) as first:
        assert first.stdout is not None
        assert first.stdin is not None
        assert (await first.stdout.readline()).split()[0] == b"in"
        async with _scope(keeper) as second:
            out, _ = await second.communicate(b"\n\n")
        assert out.startswith(b"GpuBusy {'service': 'job'")
        first.stdin.write(b"\n")
        assert (await first.stdout.readline()).decode().split() == ["out", f"{keeper.cgroup}/term-1/jobs/job-1"]
        os.close(take_path(path))
        ticks = proc.stat(first.pid)
        assert ticks is not None
        assert 0 <= await ended(first.pid, ticks.start_ticks) - deadline <= TICK + KILL_TIME
    async with _scope(keeper) as third:
        assert (await third.communicate())[0].startswith(b"NoAuthority")


async def test_gpu_lock_is_free_after_its_process_died_inside_the_block(any_keeper: Bed) -> None:
    await any_keeper.arm(1)
    path = await any_keeper.give_lock(1)
    async with _scope(any_keeper) as scope:
        assert scope.stdout is not None
        await scope.stdout.readline()
        scope.send_signal(signal.SIGKILL)
        await any_keeper.event("lock-free", gpu=0)
        os.close(take_path(path))


async def test_a_job_in_weak_containment_ends_with_the_term_too(weak_keeper: Bed) -> None:
    deadline = await weak_keeper.arm(1, 5.0)
    await weak_keeper.give_lock(1)
    file = weak_keeper.run / "job"
    async with _begun(weak_keeper, "--gpu", "0", "--", "sh", "-c", f"echo $$ > {file}; exec sleep 600"):
        pid, ticks = await pid_from(file)
        assert 0 <= await ended(pid, ticks) - deadline <= TICK + KILL_TIME


async def test_a_job_that_takes_a_second_gpus_lock_keeps_the_first_until_it_has_ended(any_keeper: Bed) -> None:
    """Moved out of its box by the second taking, it took the first lock out of the keeper's sight."""
    await any_keeper.arm(1)
    for gpu in (0, 1):
        await any_keeper.give_lock(1, gpu)
    file = any_keeper.run / "job"
    script = (
        "import os, signal; os.closerange(3, 256)\n"
        f"with open({str(file)!r}, 'w') as f: print(os.getpid(), file=f)\n"
        "signal.pause()"
    )
    inner = _command(any_keeper, "--gpu", "1", "--", sys.executable, "-c", script)
    async with _begun(any_keeper, "--gpu", "0", "--", *inner):
        await pid_from(file)
        for index in ("0", "1"):
            assert (await _lock_run(any_keeper, "--gpu", index, "--", "true")).code == 75
    for gpu in (0, 1):
        await any_keeper.event("lock-free", gpu=gpu)


async def test_taking_a_lock_again_and_again_does_not_grow_the_keeper(keeper: Bed) -> None:
    """Its memory is locked, and limited. Nobody listens meanwhile: what it keeps for a supervisor that does not get to
    read is another matter."""
    await keeper.arm(1)
    await keeper.give_lock(1)
    code = (
        "import sys; from supervisor.mutex import gpu_lock\n"
        "for n in range(int(sys.argv[1])):\n    with gpu_lock(0, run=sys.argv[2]): pass"
    )

    async def take(times: int) -> int:
        await keeper.client.close()
        async with child(sys.executable, "-c", code, str(times), str(keeper.run)) as process:
            assert await process.wait() == 0
        await keeper.reconnect()
        return int((await keeper.call("hello"))["rss_bytes"])

    before = await take(200)
    assert await take(3000) - before < 150_000  # 105 bytes for each taking would be twice that


async def test_a_held_lock_is_not_exchanged_for_another_inode(keeper: Bed) -> None:
    await keeper.arm(1)
    await keeper.give_lock(1)
    await keeper.start(1, "s", "sleep", "600", lock=0)
    other = os.open(keeper.run / "other.lock", os.O_RDWR | os.O_CREAT)
    try:
        with pytest.raises(KeeperRefused) as refused:
            await keeper.call("locks", fds=(other,), token=1, locks=[{"gpu": 0, "path": "x"}])
        assert refused.value.error == "held"
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(other)
