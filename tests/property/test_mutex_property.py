"""Many processes take, die, delete and replace: there are never two holders."""

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

_WORKER = """
import os, random, sys, time
sys.path.append(sys.argv[1])
from supervisor.flock import MutexBusy, take_path
path, end, chance = sys.argv[2], float(sys.argv[3]), random.Random(int(sys.argv[4]))
taken = 0
while time.monotonic() < end:
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
print(taken)
"""


@pytest.mark.parametrize("seed", [1, 2])
def test_never_two_holders_while_the_file_is_deleted_and_replaced_all_the_time(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    path = tmp_path / "gpu.lock"
    end = time.monotonic() + _SECONDS
    workers = [
        subprocess.Popen(
            [sys.executable, "-I", "-c", _WORKER, str(_ROOT), str(path), str(end), str(seed * 100 + number)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(_PROCESSES)
    ]
    while time.monotonic() < end:
        _vandalise(path, chance)
        time.sleep(chance.random() * 0.003)
    taken = 0
    for worker in workers:
        out, err = worker.communicate(timeout=20)
        assert "FileExistsError" not in err, f"two holders:\n{err}"
        assert worker.returncode == 0, err
        taken += int(out)
    assert taken > 50
    assert Path(guard_path(str(path))).exists()


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
