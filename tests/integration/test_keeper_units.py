"""Sidecars, and looks from inside: further processes in the cgroup of a service."""

import asyncio
import errno
import os
import resource
import signal
from pathlib import Path
from typing import Any

import pytest

from election.clock import boot_time
from supervisor import proc
from supervisor.keeper.client import KeeperRefused
from tests.bed.keeper import Bed, soon

SLEEP = ("sleep", "1000")


def _lives(pid: int) -> bool:
    found = proc.stat(pid)
    return found is not None and found.state not in "ZX"


async def test_a_sidecar_starts_before_its_service_in_a_cgroup_below_its_own(keeper: Bed) -> None:
    await keeper.arm(1)
    side = await keeper.start(1, "s", *SLEEP, unit="side-proxy")
    main = await keeper.start(1, "s", *SLEEP)
    assert proc.cgroup_path(side["pid"]) == f"{keeper.cgroup}/term-1/s/side-proxy"
    assert main["cgroup"] == side["cgroup"]
    hello = (await keeper.call("hello"))["services"]["s"]
    assert (hello["pid"], hello["units"]["side-proxy"]["pid"]) == (main["pid"], side["pid"])
    await keeper.call("kill", service="s")
    await keeper.event("empty", service="s")
    assert not _lives(side["pid"])
    assert not _lives(main["pid"])


async def test_the_end_of_a_sidecar_is_told_and_leaves_its_service_alone(any_keeper: Bed) -> None:
    keeper = any_keeper
    await keeper.arm(1)
    side = await keeper.start(1, "s", "sh", "-c", "exit 3", unit="side-proxy")
    await keeper.event("exited", service="s", pid=side["pid"], status=3 << 8)
    side = await keeper.start(1, "s", *SLEEP, unit="side-proxy")
    main = await keeper.start(1, "s", *SLEEP)
    await keeper.call("kill", service="s", unit="side-proxy")
    await keeper.event("exited", service="s", pid=side["pid"], status=int(signal.SIGKILL))
    assert _lives(main["pid"])


async def test_the_lock_is_taken_before_the_sidecars_which_do_not_get_it(keeper: Bed) -> None:
    await keeper.arm(1)
    path = await keeper.give_lock(1)
    side = await keeper.start(1, "s", *SLEEP, unit="side-proxy", lock=0)
    fds = [Path(f"/proc/{side['pid']}/fd/{fd}") for fd in os.listdir(f"/proc/{side['pid']}/fd")]
    assert not any(fd.samefile(path) for fd in fds)
    with pytest.raises(KeeperRefused, match="busy"):
        await keeper.start(1, "other", *SLEEP, lock=0)
    main = await keeper.start(1, "s", *SLEEP, lock=0)
    assert path.samefile(f"/proc/{main['pid']}/fd/3")
    await keeper.call("kill", service="s")
    await keeper.event("empty", service="s")
    await keeper.call("remove", service="s")
    await keeper.start(1, "other", *SLEEP, lock=0)


async def _as_soon_as_it_is_empty(keeper: Bed) -> dict[str, Any]:
    """What was killed may take a moment to be gone; until then there is no second one beside it."""
    end = soon()
    while True:
        try:
            return await keeper.start(1, "s", "true", unit="look-ready")
        except KeeperRefused as refusal:
            if refusal.fields["errno"] != errno.EBUSY or boot_time() > end:
                raise
            await asyncio.sleep(0.01)


async def test_a_look_starts_only_beside_a_service_that_runs(any_keeper: Bed) -> None:
    keeper = any_keeper
    await keeper.arm(1)
    with pytest.raises(KeeperRefused, match="does not run"):
        await keeper.start(1, "s", "true", unit="look-ready")
    main = await keeper.start(1, "s", *SLEEP)
    for status in (0, 1, 0):
        look = await keeper.start(1, "s", "sh", "-c", f"exit {status}", unit="look-ready")
        await keeper.event("exited", service="s", pid=look["pid"], status=status << 8)
    look = await keeper.start(1, "s", "sh", "-c", "setsid sleep 1000 & sleep 1000", unit="look-ready")
    with pytest.raises(KeeperRefused, match="runs already"):
        await keeper.start(1, "s", "true", unit="look-ready")
    await keeper.call("kill", service="s", unit="look-ready")
    await keeper.event("exited", service="s", pid=look["pid"])
    look = await _as_soon_as_it_is_empty(keeper)
    await keeper.event("exited", service="s", pid=look["pid"], status=0)
    with pytest.raises(KeeperRefused, match="runs already"):
        await keeper.start(1, "s", *SLEEP, unit="side-late")
    assert _lives(main["pid"])


async def test_a_signal_to_the_main_unit_spares_the_sidecars(any_keeper: Bed) -> None:
    keeper = any_keeper
    await keeper.arm(1)
    side = await keeper.start(1, "s", *SLEEP, unit="side-proxy")
    main = await keeper.start(1, "s", *SLEEP)
    answer = await keeper.call("signal", service="s", unit="main", signal=int(signal.SIGUSR1))
    assert answer["signalled"] == 1
    await keeper.event("exited", service="s", pid=main["pid"], status=int(signal.SIGUSR1))
    assert _lives(side["pid"])


async def test_a_sidecar_that_cannot_be_started_leaves_nothing_behind(keeper: Bed) -> None:
    await keeper.arm(1)
    with pytest.raises(KeeperRefused, match="No such file"):
        await keeper.start(1, "s", "no-such-command", unit="side-proxy")
    await keeper.call("remove", service="s")
    assert (await keeper.call("hello"))["services"] == {}


@pytest.mark.parametrize("unit", ["main", "side-", "job-1", "../x", "side-a/b", 7, ""])
async def test_no_other_names_are_taken_for_units(keeper: Bed, unit: object) -> None:
    await keeper.arm(1)
    with pytest.raises(KeeperRefused, match="malformed"):
        await keeper.start(1, "s", *SLEEP, unit=unit)


async def test_what_cannot_be_started_beside_a_service_leaves_it_its_cgroup(keeper: Bed) -> None:
    await keeper.arm(1)
    main = await keeper.start(1, "s", *SLEEP)
    limits = resource.prlimit(keeper.pid, resource.RLIMIT_NOFILE)
    used = max(int(name) for name in os.listdir(f"/proc/{keeper.pid}/fd"))
    resource.prlimit(keeper.pid, resource.RLIMIT_NOFILE, (used + 1, limits[1]))  # as ENOMEM or RLIMIT_NPROC would
    try:
        with pytest.raises(KeeperRefused, match="no child"):
            await keeper.start(1, "s", "true", unit="look-ready")
    finally:
        resource.prlimit(keeper.pid, resource.RLIMIT_NOFILE, limits)
    assert (await keeper.call("hello"))["services"]["s"]["cgroup"] == main["cgroup"]
    await keeper.call("kill", service="s")
    await keeper.event("empty", service="s")
    assert not _lives(main["pid"])


async def test_sidecars_that_were_killed_make_room_for_a_fresh_cgroup(keeper: Bed) -> None:
    """Nothing can be born in a cgroup that was killed."""
    await keeper.arm(1)
    side = await keeper.start(1, "s", *SLEEP, unit="side-proxy")
    await keeper.call("kill", service="s")
    await keeper.event("exited", service="s", pid=side["pid"])
    await keeper.event("empty", service="s")
    side = await keeper.start(1, "s", *SLEEP, unit="side-proxy")
    main = await keeper.start(1, "s", *SLEEP)
    assert _lives(side["pid"])
    assert _lives(main["pid"])
