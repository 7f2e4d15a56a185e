"""What a turn on the lock costs: `gpuward lock run --path` beside flock(1) and the filelock library.

    python -m benchmarks.lock_run [--rounds N]

Every round runs each case once, in a shuffled order, so that a busy machine slows all of them alike. "Over bare" is the
difference to running `true` alone. The last table is the keeper's resident memory, locked where that is allowed.
"""

import argparse
import asyncio
import random
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

from election.clock import boot_time, boot_time_loop
from supervisor.keeper.client import spawn

_SCRIPT = "import sys; from supervisor.entry import main; sys.exit(main())"
"""What pip writes into the `gpuward` script, for a checkout that was never installed."""
_FILELOCK = """
import subprocess, sys
from filelock import FileLock, Timeout
try:
    with FileLock(sys.argv[1], timeout=0):
        sys.exit(subprocess.call(sys.argv[2:]))
except Timeout:
    sys.exit(75)
"""


def main() -> None:
    """Print two Markdown tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory(prefix="gpuward-benchmark-") as name:
        free = _measure(_cases(Path(name), "free"), rounds)
        with subprocess.Popen(["flock", f"{name}/busy", "sh", "-c", "echo; exec cat"], stdin=-1, stdout=-1) as holder:
            assert holder.stdout is not None
            holder.stdout.readline()
            busy = _measure(_cases(Path(name), "busy"), rounds)
            holder.communicate()
    _print(free, busy)
    with asyncio.Runner(loop_factory=boot_time_loop) as runner:
        runner.run(_keeper())


def _cases(folder: Path, name: str) -> dict[str, list[str]]:
    file = str(folder / name)
    script = Path(sysconfig.get_path("scripts")) / "gpuward"
    ours = [str(script)] if script.exists() else [sys.executable, "-c", _SCRIPT]
    return {
        "true (bare)": ["true"],
        "python -c pass": [sys.executable, "-c", "pass"],
        "gpuward lock run": [*ours, "lock", "run", "--path", file, "--", "true"],
        "flock(1)": ["flock", "-n", file, "true"],
        "filelock": [sys.executable, "-c", _FILELOCK, file, "true"],
    }


def _measure(cases: dict[str, list[str]], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of every run."""
    times: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds):
        order = list(cases)
        random.shuffle(order)
        for name in order:
            began = time.perf_counter()
            subprocess.run(cases[name], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
            times[name].append((time.perf_counter() - began) * 1000)
    return times


def _print(free: dict[str, list[float]], busy: dict[str, list[float]]) -> None:
    bare = statistics.median(free["true (bare)"])
    print("| command | free, median ms | p99 | over bare | busy exit, median ms | p99 |")
    print("|---|---|---|---|---|---|")
    for name, times in free.items():
        median = statistics.median(times)
        locks = "lock" in name
        refused = f"{statistics.median(busy[name]):.1f} | {_p99(busy[name]):.1f}" if locks else "– | –"
        print(f"| {name} | {median:.1f} | {_p99(times):.1f} | {median - bare:.1f} | {refused} |")


def _p99(times: list[float]) -> float:
    return statistics.quantiles(times, n=100, method="inclusive")[98]


async def _keeper() -> None:
    with tempfile.TemporaryDirectory(prefix="gpuward-benchmark-") as run:
        keeper = await spawn(Path(run), None, None, deadline=boot_time() + 10)
        hello = await keeper.call("hello", deadline=boot_time() + 5)
        await keeper.call("quit", deadline=boot_time() + 5)
        await keeper.close()
    print("\n| keeper | value |\n|---|---|")
    print(f"| resident memory | {hello['rss_bytes'] / 1e6:.1f} MB |")
    print(f"| memory locked | {hello['memory_not_locked_because'] or 'yes'} |")


if __name__ == "__main__":
    main()
