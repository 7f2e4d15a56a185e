"""Random sequences of faults, each from a fresh seed: `make chaos [RUNS=60] [SEED=N] [JOBS=2]`.

Prints one line for each run. The first that is not ok ends it, with its seed and timeline; `make chaos SEED=N RUNS=1`
plays the same faults again.
"""

import argparse
import json
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

LIMIT = 600
"""Seconds for one run."""


def command(seed: int, *arguments: str) -> list[str]:
    """One run in a network namespace of its own."""
    return ["unshare", "--net", sys.executable, "-m", "tests.chaos.run", "--seed", str(seed), *arguments]


def play(seed: int, *arguments: str) -> tuple[dict[str, Any], str]:
    """The result, and the timeline where it is not ok."""
    done = subprocess.run(command(seed, *arguments), capture_output=True, text=True, timeout=LIMIT, check=False)
    lines = done.stdout.splitlines()
    return (json.loads(lines[-1]) if lines else {"seed": seed, "ok": False, "why": ["it broke"]}), done.stderr


def main() -> int:
    parser = argparse.ArgumentParser(description="Chaos runs from fresh seeds.")
    parser.add_argument("--runs", type=int, default=60)
    parser.add_argument("--seed", type=int, help="of the first run; the next ones count on from it")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1, help="so many at the same time; each needs most of a CPU")
    arguments = parser.parse_args()
    first = random.SystemRandom().randrange(2**31) if arguments.seed is None else arguments.seed
    takeovers, excused = 0, dict[str, float]()
    with ThreadPoolExecutor(arguments.jobs) as pool:
        runs = [pool.submit(play, first + n, "--steps", str(arguments.steps)) for n in range(arguments.runs)]
        for run in as_completed(runs):
            result, timeline = run.result()
            print(json.dumps(result), flush=True)
            if not result["ok"]:
                print(f"{timeline}\nnot ok: seed {result['seed']}: {'; '.join(result['why'])}", file=sys.stderr)
                pool.shutdown(cancel_futures=True)
                return 1
            takeovers += len(result["takeovers"])
            for kind, seconds in result["excused_s"].items():
                excused[kind] = max(excused.get(kind, 0.0), seconds)
    print(f"{arguments.runs} runs ok, {takeovers} take-overs, overlap 0; longest of each exception, in s: {excused}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
