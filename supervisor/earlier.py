"""What an earlier run of this node left: a restarted supervisor ends all of it before it does anything else.

What stands in a cgroup is an earlier run's only if no other keeper has that cgroup: without a keeper of our own nothing
there is touched, and nothing of this boot counts as gone.
"""

import contextlib
from collections.abc import Callable, Iterator

from election.clock import Clock
from election.timing import LIFE
from supervisor.keeper.client import KeeperGone, KeeperRefused
from supervisor.keeper.link import KeeperLink
from supervisor.remains import Remains
from supervisor.run_folder import RunFolder, no_keeper_in, nobody_else_in

CLEAN_UP = 10.0
"""Seconds given to the processes of an earlier run before those with SIGKILL pending are frozen and named."""
SPAWN = 5.0
"""Seconds for a keeper to start and answer; it takes about 50 ms."""


async def end_earlier_run(
    folder: RunFolder, keeper: KeeperLink, remains: Remains, clock: Clock, note: Callable[[str], None]
) -> tuple[list[int], bool]:
    """Processes that SIGKILL has not ended, and whether it is proven that nothing else of this boot is left."""
    left, ended = await _by_its_keeper(keeper, clock, note)
    if keeper.connected and keeper.hello.get("parent") != folder.cgroup:
        note("the keeper of an earlier run has another cgroup: it is replaced")
        await keeper.leave(deadline=clock.now() + LIFE)
        await _ensure(keeper, clock, note)
    left += await _in_earlier_cgroup(folder, remains, clock, note)
    with _ours(folder, keeper) as ours:
        if ours and not ended:
            left += await remains.end(None, by=clock.now() + CLEAN_UP)
        gone = ended or (ours and not remains.weak)
    if gone and not left:
        folder.note_parent()
    return left, gone


@contextlib.contextmanager
def _ours(folder: RunFolder, keeper: KeeperLink) -> Iterator[bool]:
    """Is what stands in our cgroup an earlier run's of ours? The keeper that has it is ours, or nobody has it."""
    if keeper.connected or folder.cgroup is None:
        yield keeper.connected
        return
    with no_keeper_in(folder.cgroup) as free:
        yield free


async def _by_its_keeper(keeper: KeeperLink, clock: Clock, note: Callable[[str], None]) -> tuple[list[int], bool]:
    """By the keeper that started it. True: it knew of everything, and nothing is left but what it names."""
    if not keeper.connected:
        return [], False
    armed = keeper.hello.get("armed")
    if armed is None:
        return [], keeper.found
    note(f"ending term {armed['token']} of an earlier run")
    by = min(clock.now() + CLEAN_UP, max(clock.now(), armed["deadline_ns"] / 1e9))  # then its switch does it anyway
    try:
        answer = await keeper.call("end", deadline=by + 0.5, token=armed["token"], by_ns=int(by * 1e9))
    except (KeeperGone, KeeperRefused) as error:
        note(f"the keeper did not end it, ending it without: {error}")
        return [], False
    return list(answer["unkillable"]), True


async def _in_earlier_cgroup(
    folder: RunFolder, remains: Remains, clock: Clock, note: Callable[[str], None]
) -> list[int]:
    """`cgroup` was changed since the last run, which may have left something in the old one."""
    cgroup = folder.earlier_cgroup
    if cgroup is None:
        return []
    with nobody_else_in(cgroup) as free:
        if not free:
            note(f"the cgroup {cgroup} of an earlier run is left alone: another supervisor or keeper has it")
            return []
        note(f"ending what an earlier run left in the cgroup {cgroup}")
        return list(await remains.below(cgroup).end(None, by=clock.now() + CLEAN_UP))


async def _ensure(keeper: KeeperLink, clock: Clock, note: Callable[[str], None]) -> None:
    try:
        await keeper.ensure(deadline=clock.now() + SPAWN)
    except (KeeperGone, KeeperRefused, OSError) as error:
        note(f"no keeper: {error}")
