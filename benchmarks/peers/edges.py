"""Whether a supervisor is right where it is hard to be: three questions, each answered by looking from outside.

The right answer is bold.
"""

import os
import signal
import time

from benchmarks.peers.bed import Bed
from benchmarks.peers.disk import FreezableDisk, freezable_disk, in_d_state
from benchmarks.peers.peer import Peer
from benchmarks.peers.service import BenchmarkError, came, until

PATIENCE = 15.0
"""Seconds for what a peer was asked to do, or does by itself."""
FROZEN = 20.0
"""Seconds for which a process hangs: longer than SIGTERM, SIGKILL and all further waits of any peer, as configured."""
SETTLE = 8.0
"""Seconds for a peer that was started again to do what it does."""


def grandchild_ended(bed: Bed, kind: type[Peer]) -> str:
    """A service leaves a double-forked process in a session of its own: does it end when the service is stopped?"""
    services = bed.services(0, forker=("grandchild",))
    with bed.running(kind, services) as (peer, _):
        until(lambda: "forker-grandchild" in peer.pids(), PATIENCE, "the grandchild")
        asked = peer.ask(peer.stop_command("forker"))
        try:
            until(lambda: "forker" not in peer.pids(), PATIENCE, f"{kind.name}: a service to stop")
            return "**yes**" if came(lambda: "forker-grandchild" not in peer.pids(), 5.0) else "no"
        finally:
            asked.kill()
            asked.wait()


def second_copy(bed: Bed, kind: type[Peer]) -> str:
    """A service hangs in the kernel and is to be restarted: is a second copy started beside the one that cannot end?
    And is another service, killed meanwhile, restarted as ever?"""
    with freezable_disk(bed.folder) as disk:
        file = disk.path / "file"
        file.touch()
        services = bed.services(1, stuck=("write", str(file)))
        with bed.running(kind, services) as (peer, _):
            try:
                return _while_frozen(peer, disk)
            finally:
                disk.thaw()


def _while_frozen(peer: Peer, disk: FreezableDisk) -> str:
    disk.freeze()
    began = time.monotonic()
    if not in_d_state(peer.pids()["stuck"][0]):
        raise BenchmarkError("the service does not hang in the kernel")
    asked = peer.ask(peer.restart_command("stuck"))
    try:
        twice = came(lambda: len(peer.pids()["stuck"]) > 1, FROZEN / 2)
        other, killed_at = peer.services[0], time.monotonic_ns()
        os.kill(peer.pids()[other.name][0], signal.SIGKILL)
        goes_on = came(lambda: other.started(killed_at) is not None, FROZEN / 2)
        twice = twice or came(lambda: len(peer.pids()["stuck"]) > 1, began + FROZEN - time.monotonic())
    finally:
        asked.kill()
        asked.wait()
    return ("yes" if twice else "**no**") + ("" if goes_on else ", restarts no other one meanwhile")


def killed_and_started_again(bed: Bed, kind: type[Peer]) -> str:
    """All of its own processes get SIGKILL at once, then it is started again: what becomes of its services?"""
    if not kind.restartable:
        return "–"
    services = bed.services(4)
    with bed.running(kind, services) as (peer, _):
        time.sleep(2.0)
        before = peer.pids()
        peer.kill()
        left = peer.pids()
        peer.start()
        time.sleep(SETTLE)
        after = peer.pids()
        if left != before:
            return "its services end with it"
        if any(len(pids) > 1 for pids in after.values()):
            return "runs everything twice" if all(len(pids) > 1 for pids in after.values()) else "runs some twice"
        if after != before:
            return "restarts them"
        killed_at = time.monotonic_ns()
        os.kill(after[services[0].name][0], signal.SIGKILL)
        adopted = came(lambda: services[0].started(killed_at) is not None, PATIENCE)
        return "**adopts**" if adopted else "leaves them alone"
