"""Many processes take, die, delete and replace: there are never two holders."""

import contextlib
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from supervisor.flock import guard_path

_ROOT = Path(__file__).parents[2]
_PROCESSES = 12
_SECONDS = 3.0
_LEAST = 5
"""Each process goes on for so long, and until it has taken it so often."""

_WORKER = """
import os, random, sys, time
sys.path.append(sys.argv[1])
from supervisor.flock import MutexBusy, take_path
path, end, least = sys.argv[2], float(sys.argv[3]), int(sys.argv[4])
chance = random.Random(int(sys.argv[5]))
taken = 0
while time.monotonic() < end or taken < least:
    try:
        fd = take_path(path)
    except MutexBusy:
        time.sleep(chance.random() * 0.002)
        continue
    taken += 1
    # O_EXCL on a folder of its own is the judge: it fails if anybody else is inside
    os.mkdir(path + ".inside")
    if chance.random() < 0.2:
        os.set_inheritable(fd, True)
        if os.fork() == 0:  # the child outlives its parent's close, inside
            time.sleep(chance.random() * 0.002)
            os.rmdir(path + ".inside")
            os._exit(0)
        os.close(fd)
        os.wait()
        continue
    time.sleep(chance.random() * 0.002)
    os.rmdir(path + ".inside")
    os.close(fd)
"""


@pytest.mark.parametrize("seed", [1, 2])
def test_never_two_holders_while_the_file_is_deleted_and_replaced_all_the_time(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    path = tmp_path / "gpu.lock"
    end = time.monotonic() + _SECONDS
    with contextlib.ExitStack() as ends:
        workers = []
        for number in range(_PROCESSES):
            arguments = map(str, (_ROOT, path, end, _LEAST, seed * 100 + number))
            words = [sys.executable, "-I", "-c", _WORKER, *arguments]
            workers.append(ends.enter_context(subprocess.Popen(words, stdout=-1, stderr=-1, text=True)))
            ends.callback(workers[-1].kill)
        while any(worker.poll() is None for worker in workers):
            _vandalise(path, chance)
            time.sleep(chance.random() * 0.003)
        for worker in workers:
            _, err = worker.communicate()
            assert "FileExistsError" not in err, f"two holders:\n{err}"
            assert worker.returncode == 0, err
    assert Path(guard_path(str(path))).exists()


_MORTAL = """
import fcntl, os, random, signal, sys, time
sys.path.append(sys.argv[1])
from supervisor.flock import MutexBusy, take_path
path, chance = sys.argv[2], random.Random(int(sys.argv[3]))
judge = os.open(path + ".judge", os.O_RDWR | os.O_CREAT)
seen = os.open(path + ".seen", os.O_WRONLY | os.O_CREAT | os.O_APPEND)


def goes_on():
    return not os.path.exists(path + ".stop")


def work():
    while goes_on():
        try:
            fd = take_path(path)
        except MutexBusy:
            time.sleep(chance.random() * 0.002)
            continue
        child = os.fork() if chance.random() < 0.3 else None
        if child:  # which goes on with the lock alone, also where this one is killed meanwhile
            os.close(fd)
            os.waitpid(child, 0)
            continue
        hold()
        os.close(fd)
        if child == 0:
            os._exit(0)


def hold():
    # The judge is a POSIX lock. It is not inherited by fork; and of a process that dies, it is gone before the flock,
    # since its fd is the lower one, and the flock goes with the last reference to its file only.
    try:
        fcntl.lockf(judge, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.write(seen, b"2")
    os.write(seen, b"1")
    time.sleep(chance.random() * 0.002)
    fcntl.lockf(judge, fcntl.LOCK_UN)


while goes_on():
    pid = os.fork()
    if pid == 0:
        chance.seed(os.getpid())
        os.setpgid(0, 0)
        work()
        os._exit(0)
    try:
        os.setpgid(pid, pid)
    except OSError:  # it has done so itself, or has ended
        pass
    time.sleep(chance.random() * 0.02)
    if chance.random() < 0.5:
        os.kill(pid, signal.SIGKILL)  # the first one only: its child keeps the lock
    else:
        os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
"""
_TURNS = 150


def test_never_two_holders_while_holders_are_killed_and_the_file_is_deleted_and_replaced(tmp_path: Path) -> None:
    """filelock 27, portalocker 115: also where a holder dies in the middle, and its child goes on with the lock."""
    chance = random.Random(3)
    path = tmp_path / "gpu.lock"
    seen = tmp_path / "gpu.lock.seen"
    seen.touch()
    command = [sys.executable, "-I", "-c", _MORTAL, str(_ROOT), str(path)]
    with contextlib.ExitStack() as ends:
        workers = []
        for number in range(_PROCESSES):
            words = [*command, str(number)]
            workers.append(ends.enter_context(subprocess.Popen(words, stdout=-1, stderr=subprocess.STDOUT, text=True)))
            ends.callback((tmp_path / "gpu.lock.stop").touch)  # by which it ends
        end = time.monotonic() + 60
        while seen.stat().st_size < _TURNS and time.monotonic() < end:
            _vandalise(path, chance)
            time.sleep(chance.random() * 0.003)
        (tmp_path / "gpu.lock.stop").touch()
        for worker in workers:
            assert (worker.communicate()[0], worker.returncode) == ("", 0)  # its orphans have ended, too
    assert set(seen.read_text()) == {"1"}
    assert seen.stat().st_size >= _TURNS


def _vandalise(path: Path, chance: random.Random) -> None:
    if chance.random() < 0.5:
        path.unlink(missing_ok=True)
    else:
        fresh = path.with_name("fresh")
        fresh.touch()
        os.rename(fresh, path)


def test_a_killed_holder_never_leaves_the_lock_behind(tmp_path: Path) -> None:
    path = tmp_path / "gpu.lock"
    code = f"import sys, time; sys.path.append({str(_ROOT)!r}); from supervisor.flock import take_path; "
    code += f"take_path({str(path)!r}); print('in', flush=True); time.sleep(20)"
    for _ in range(10):
        with subprocess.Popen([sys.executable, "-I", "-c", code], stdout=subprocess.PIPE) as holder:
            assert holder.stdout is not None
            assert holder.stdout.readline() == b"in\n"
            holder.kill()
