"""A sample service of `gpuward demo`: it takes turns on the GPU with its seven siblings, for ever.

A turn is a child started by `gpuward lock run --gpu 0`, which has the mutex: it opens the (simulated) device for 50 to
300 ms, notes the turn, and ends. Busy (exit 75): another service has its turn; try again a little later.

Run with `-I -S` by the interpreter of the demo, standard library only, so that eight of them cost little. What it needs
to know comes by environment from supervisor/demo/cluster.py:
"""

import contextlib
import json
import os
import time

LOCK_RUN = "GPUWARD_DEMO_LOCK_RUN"
"""JSON list: the command up to and including `lock run --gpu 0 --`."""
DEVICE = "GPUWARD_DEMO_DEVICE"
"""The device file to open."""
TURNS = "GPUWARD_DEMO_TURNS"
"""A file that gets one line per turn: the service's name."""

BUSY = 75
SHORTEST_TURN, LONGEST_TURN = 0.05, 0.3
SHORTEST_PAUSE, LONGEST_PAUSE = 0.3, 1.2
"""Seconds."""
STUCK_NAME = "stuck"
"""Beside the file of turns. Where there is such a file, a turn opens it: see supervisor/demo/mounts.py."""
TURN = 'exec 9<"$1" && echo "$3" >>"$2" && { [ ! -e "$5" ] || read -r _ <"$5"; exec sleep "$4"; }'
"""One process: the shell keeps the device open on fd 9 and becomes `sleep`."""


def between(low: float, high: float) -> float:
    """Uniform; `random` would be half of this program's size."""
    return low + (high - low) * int.from_bytes(os.urandom(4), "big") / 2**32


def take_turn() -> int:
    """Exit status of one attempt."""
    seconds = f"{between(SHORTEST_TURN, LONGEST_TURN):.3f}"
    command = json.loads(os.environ[LOCK_RUN])
    command += ["/bin/sh", "-c", TURN, "turn", os.environ[DEVICE], os.environ[TURNS]]
    stuck = os.path.join(os.path.dirname(os.environ[TURNS]), STUCK_NAME)
    command += [os.environ.get("GPUWARD_SERVICE", "?"), seconds, stuck]
    pid = os.posix_spawn(command[0], command, os.environ)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def main() -> None:
    while True:
        status = take_turn()
        if status not in (0, BUSY):
            with contextlib.suppress(OSError):  # a full disk is no reason to end
                os.write(2, f"the turn ended with {status}\n".encode())
        time.sleep(between(SHORTEST_PAUSE, LONGEST_PAUSE))


if __name__ == "__main__":
    main()
