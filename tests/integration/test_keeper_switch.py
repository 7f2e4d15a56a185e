"""The dead man's switch (rule 16): at the deadline everything ends, with no help from anybody."""

import asyncio
import contextlib
import errno
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from election.clock import boot_time
from election.timing import KILL_TIME, TICK
from supervisor import proc
from supervisor.cgroup import Group
from supervisor.keeper import link
from supervisor.keeper.client import KeeperGone, KeeperRefused, spawn
from supervisor.keeper.link import KeeperLink
from tests.bed.children import child
from tests.bed.keeper import PATIENCE, Bed, ended, pid_from, soon, until
from tests.bed.leased import leased

_LATE_S = TICK + KILL_TIME
"""What the times of the election allow for (rule 22)."""


@contextlib.asynccontextmanager
async def _stand_in(
    bed: Bed, token: int, seconds: float, *argv: str
) -> AsyncIterator[tuple[asyncio.subprocess.Process, Any]]:
    """A supervisor of its own process: it takes the connection over from the bed."""
    command = (sys.executable, "-m", "tests.bed.stand_in", str(bed.run), str(token), str(seconds), *argv)
    async with child(*command, stdout=asyncio.subprocess.PIPE) as process:
        assert process.stdout is not None
        yield process, json.loads(await process.stdout.readline())


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_services_end_at_the_deadline_when_the_supervisor_is_killed_or_stopped(
    any_keeper: Bed, how: signal.Signals
) -> None:
    """ansible-role-patroni 24, the SIGSTOP row of docs/election.md: nobody else solves it."""
    async with _stand_in(any_keeper, 7, 2.0, "sleep", "600") as (supervisor, said):
        supervisor.send_signal(how)
        when = await ended(said["pid"], said["start_ticks"])
        assert 0 <= when - said["deadline"] <= _LATE_S


async def test_the_keeper_measures_its_kills_and_how_late_its_timers_are(any_keeper: Bed) -> None:
    """Rule 22; being stopped for longer than 2 s is no measure of timers."""
    await any_keeper.arm(7)
    await any_keeper.start(7, "s", "sleep", "600")
    assert (await any_keeper.call("hello"))["kill_s"] == 0
    await any_keeper.call("end", token=7, by_ns=int(soon() * 1e9))
    assert 0 < (await any_keeper.call("hello"))["kill_s"] < 2

    async def stopped_for(seconds: float) -> tuple[float, float]:
        """How long it really was, and what the keeper says: it sleeps for 1 s, unless it is called."""
        began = boot_time()
        os.kill(any_keeper.pid, signal.SIGSTOP)
        await asyncio.sleep(seconds)
        os.kill(any_keeper.pid, signal.SIGCONT)
        took = boot_time() - began
        await asyncio.sleep(1.5)
        return took, (await any_keeper.call("hello"))["tick_s"]

    assert (await stopped_for(3.5))[1] < 2
    took, tick = await stopped_for(1.6)
    while took >= 2:  # that was no measure, and it was our own lateness
        took, tick = await stopped_for(1.6)
    assert 0.5 < tick < 2


async def test_a_closed_connection_changes_nothing_before_the_deadline(any_keeper: Bed) -> None:
    deadline = await any_keeper.arm(3, 2.0)
    started = await any_keeper.start(3, "s", "sleep", "600")
    await any_keeper.client.close()
    assert await ended(started["pid"], started["start_ticks"]) >= deadline


async def test_the_deadline_can_move_on_but_not_back(keeper: Bed) -> None:
    first = await keeper.arm(3, 2.0)
    started = await keeper.start(3, "s", "sleep", "600")
    second = await keeper.arm(3, 3.0)
    with pytest.raises(KeeperRefused, match="before the present one"):
        await keeper.call("arm", token=3, deadline_ns=int(first * 1e9))
    when = await ended(started["pid"], started["start_ticks"])
    assert 0 <= when - second <= _LATE_S


async def test_double_fork_setsid_and_ignored_signals_do_not_escape(any_keeper: Bed) -> None:
    file = any_keeper.run / "escaped"
    script = f"trap '' TERM HUP INT; (setsid sh -c 'echo $$ > {file}; trap \"\" TERM; sleep 600; sleep 600' &) ; exit 0"
    deadline = await any_keeper.arm(4, 2.0)
    await any_keeper.start(4, "s", "sh", "-c", script)
    await any_keeper.event("exited", service="s", status=0)
    pid, ticks = await pid_from(file)
    assert not any(event["event"] == "empty" for event in any_keeper.events)
    when = await ended(pid, ticks)
    assert 0 <= when - deadline <= _LATE_S
    fired = await any_keeper.event("fired", token=4)
    assert fired["clean"] is True


async def test_nothing_starts_after_the_deadline_nor_for_a_lower_token_nor_after_the_switch(any_keeper: Bed) -> None:
    await any_keeper.arm(5, 1.0)
    with pytest.raises(KeeperRefused) as lower:
        await any_keeper.start(4, "s", "true")
    assert lower.value.error == "no-term"
    await any_keeper.event("fired", token=5)
    for token in (5, 4):
        with pytest.raises(KeeperRefused) as over:
            await any_keeper.start(token, "s", "true")
        assert over.value.error == "over"
        with pytest.raises(KeeperRefused) as rearm:
            await any_keeper.arm(token)
        assert rearm.value.error == "over"
    await any_keeper.arm(6)
    await any_keeper.start(6, "s", "true")


async def test_a_keeper_that_overslept_refuses_a_start_after_the_deadline(keeper: Bed) -> None:
    deadline = await keeper.arm(5, 0.5)
    os.kill(keeper.pid, signal.SIGSTOP)
    asked = asyncio.create_task(keeper.start(5, "s", "touch", str(keeper.run / "ran")))
    await asyncio.sleep(deadline - boot_time() + 0.05)
    os.kill(keeper.pid, signal.SIGCONT)
    with pytest.raises(KeeperRefused) as refused:
        await asked
    assert refused.value.error in ("deadline", "over")
    await keeper.event("fired", token=5)
    assert not (keeper.run / "ran").exists()


async def test_an_fd_of_the_terms_cgroup_is_useless_once_the_term_is_over(keeper: Bed) -> None:
    await keeper.arm(5, 2.0)
    started = await keeper.start(5, "s", "sleep", "600")
    group = Group.open(started["cgroup"] + "/main")
    procs = os.open("cgroup.procs", os.O_WRONLY, dir_fd=group.fd)
    try:
        async with child("sleep", "600") as intruder:
            await keeper.event("fired", token=5)
            with pytest.raises(OSError) as entered:  # noqa: PT011 - the number is what is looked at
                os.write(procs, str(intruder.pid).encode())
            assert entered.value.errno == errno.ENODEV
            assert intruder.returncode is None
    finally:
        os.close(procs)
        group.close()


async def test_no_folder_can_be_made_below_the_fenced_parent_until_the_next_term(keeper: Bed) -> None:
    assert keeper.cgroup is not None
    await keeper.arm(5, 0.5)
    await keeper.event("fired", token=5)
    parent = Group.open(keeper.cgroup)
    try:
        with pytest.raises(OSError):  # noqa: PT011 - EAGAIN, as the kernel has it
            parent.make("term-5")
        await keeper.arm(6)
        parent.make("elsewhere").close()
    finally:
        parent.close()


async def test_a_folder_of_a_term_that_is_over_is_killed_and_removed_when_it_appears_again(keeper: Bed) -> None:
    """A container runtime makes missing parents anew."""
    assert keeper.cgroup is not None
    await keeper.arm(5)
    await keeper.call("end", token=5, by_ns=int(soon() * 1e9))
    await keeper.arm(6)
    async with child("sleep", "600") as sleeper:
        parent = Group.open(keeper.cgroup)
        again = parent.make("term-5")
        try:
            again.enter(sleeper.pid)
            assert await asyncio.wait_for(sleeper.wait(), PATIENCE) == -signal.SIGKILL
            await until(lambda: "term-5" not in parent.children(), "the folder to go")
        finally:
            again.close()
            parent.close()


async def test_a_keeper_that_comes_after_the_deadline_refuses_what_was_over_and_ends_what_was_left(keeper: Bed) -> None:
    deadline = await keeper.arm(8, 2.0)
    left = await keeper.start(8, "s", "sleep", "600")
    os.kill(keeper.pid, signal.SIGKILL)
    await asyncio.wait_for(keeper.client.closed.wait(), PATIENCE)
    assert proc.stat(left["pid"]) is not None
    await asyncio.sleep(deadline - boot_time())
    keeper.client = await spawn(keeper.run, keeper.cgroup, None, deadline=soon())
    try:
        await ended(left["pid"], left["start_ticks"])
        with pytest.raises(KeeperRefused) as over:
            await keeper.arm(8)
        assert over.value.error == "over"
    finally:
        await keeper.call("quit")


async def test_the_highest_token_that_is_over_outlives_the_keeper(keeper: Bed) -> None:
    await keeper.arm(9)
    await keeper.call("end", token=9, by_ns=int(soon() * 1e9))
    await keeper.call("quit")
    await asyncio.wait_for(keeper.client.closed.wait(), PATIENCE)
    keeper.client = await spawn(keeper.run, keeper.cgroup, None, deadline=soon())
    assert (await keeper.call("hello"))["over"] == 9
    await keeper.call("quit")


async def test_a_second_keeper_for_the_same_run_folder_or_cgroup_does_not_start(keeper: Bed, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for run in (keeper.run, other):
        with pytest.raises(Exception, match="another keeper"):
            await spawn(run, keeper.cgroup, None, deadline=soon())


async def test_an_end_that_is_asked_for_leaves_nothing(any_keeper: Bed) -> None:
    await any_keeper.arm(2)
    started = [await any_keeper.start(2, f"s{n}", "sh", "-c", "trap '' TERM; sleep 600") for n in range(5)]
    answer = await any_keeper.call("end", token=2, by_ns=int(soon() * 1e9))
    assert answer["clean"] is True
    assert answer["unkillable"] == []
    for one in started:
        found = proc.stat(one["pid"])
        assert found is None or found.start_ticks != one["start_ticks"] or found.state in "ZX"
    hello = await any_keeper.call("hello")
    assert (hello["armed"], hello["over"], hello["services"]) == (None, 2, {})
    assert (await any_keeper.call("end", token=2, by_ns=0))["clean"] is True


async def test_what_dies_at_once_is_not_called_unkillable_when_the_time_for_the_end_has_passed(any_keeper: Bed) -> None:
    await any_keeper.arm(2)
    await any_keeper.start(2, "s", "sh", "-c", "for n in $(seq 100); do sleep 600 & done; wait")
    assert (await any_keeper.call("end", token=2, by_ns=0))["clean"] is True


async def test_a_start_that_hangs_when_its_term_ends_is_refused(any_keeper: Bed) -> None:
    await any_keeper.arm(2)
    with leased(any_keeper.run / "program") as program:
        hanging = asyncio.create_task(any_keeper.start(2, "s", program))
        await any_keeper.call("hello")
        await any_keeper.call("end", token=2, by_ns=int(soon() * 1e9))
        with pytest.raises(KeeperRefused) as refused:
            await hanging
    assert refused.value.error == "over"


async def test_a_keeper_that_runs_as_nobody_ends_everything_too(unprivileged_keeper: Bed) -> None:
    bed = unprivileged_keeper
    assert (await bed.call("hello"))["containment"] == "process-group"
    file = bed.run / "escaped"
    deadline = await bed.arm(4, 2.0)
    await bed.start(4, "s", "sh", "-c", f"(setsid sh -c 'echo $$ > {file}; sleep 600; sleep 600' &); sleep 600")
    pid, ticks = await pid_from(file)
    when = await ended(pid, ticks)
    assert 0 <= when - deadline <= _LATE_S
    await bed.event("fired", token=4)
    await bed.arm(5)
    with pytest.raises(KeeperRefused) as refused:
        await bed.start(5, "root", "true", uid=0, gid=0)
    assert (refused.value.error, refused.value.fields["stage"]) == ("exec", "user")


async def test_killing_a_weak_keeper_takes_its_direct_children_along(weak_keeper: Bed) -> None:
    await weak_keeper.arm(4)
    started = await weak_keeper.start(4, "s", "sleep", "600")
    os.kill(weak_keeper.pid, signal.SIGKILL)
    await ended(started["pid"], started["start_ticks"])


async def test_a_keeper_that_did_not_die_in_time_leaves_no_number_of_a_closed_fd(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next try would send SIGKILL through whatever has that number by then."""
    keeper = KeeperLink(tmp_path, None, None, on_event=lambda event: None, on_gone=lambda: None)
    await keeper.ensure(deadline=soon())
    pid = keeper.hello["pid"]
    assert keeper._client is not None
    await keeper._client.close()
    monkeypatch.setattr(link, "GONE_WITHIN", -1.0)
    monkeypatch.setattr(proc, "pidfd_exited", lambda pidfd: False)
    with pytest.raises(KeeperGone, match="survives SIGKILL"):
        await keeper.ensure(deadline=soon())
    assert keeper._pidfd == -1
    monkeypatch.undo()
    await keeper.ensure(deadline=soon())
    assert keeper.hello["pid"] != pid
    await keeper.leave(deadline=soon())
