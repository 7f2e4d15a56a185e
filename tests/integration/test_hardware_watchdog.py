"""The machine's watchdog as last resort (rule 16): a stand-in device that knows the calls of linux/watchdog.h alone."""

import asyncio
import itertools
import os
import signal
import stat
import subprocess
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from election.clock import boot_time
from supervisor.keeper import client
from supervisor.keeper.client import KeeperGone, KeeperRefused
from supervisor.keeper.hardware import CAN_SET_TIMEOUT, MAGIC_CLOSE, Device, Hardware, due, last_pet
from tests.bed.keeper import Bed, bed_around, soon, until
from tests.bed.nodes import LONG_TTL, Make

SOURCE = Path(__file__).parents[1] / "bed" / "watchdog_device.c"
SECOND = 10**9
ABLE = CAN_SET_TIMEOUT | MAGIC_CLOSE
NULL = os.makedev(1, 3)
"""A device that is there on each machine."""


class Call(NamedTuple):
    at_ns: int
    what: str


class StandIn:
    """The device, and keepers that see it."""

    def __init__(self, run: Path, cgroup: str, library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.run, self.cgroup = run, cgroup
        self.node, self.log, self.nowayout = run / "watchdog", run / "watchdog.log", run / "nowayout"
        try:
            os.mknod(self.node, stat.S_IFCHR | 0o600, NULL)
        except PermissionError:
            pytest.skip("needs the right to make a device node")
        self.nowayout.write_text("0\n")
        self._plain = client._environment()
        self._library, self._patch = library, monkeypatch
        self.options = ABLE

    def calls(self) -> list[Call]:
        text = self.log.read_text() if self.log.exists() else ""
        lines = [line.split(" ", 1) for line in text.splitlines()]
        return [Call(int(at), what) for at, what in lines]

    def said(self) -> list[str]:
        """Without the pets after each first one."""
        return [what for what, _ in itertools.groupby(call.what for call in self.calls())]

    async def spawn(self, timeout_s: int = 2, mode: str = "required") -> client.KeeperClient:
        ours = {
            "LD_PRELOAD": str(self._library),
            "WATCHDOG_DEVICE": str(self.node),
            "WATCHDOG_LOG": str(self.log),
            "WATCHDOG_OPTIONS": hex(self.options),
            "WATCHDOG_SYSFS": f"/sys/dev/char/{os.major(NULL)}:{os.minor(NULL)}/nowayout",
            "WATCHDOG_NOWAYOUT": str(self.nowayout),
        }
        self._patch.setattr(client, "_environment", lambda: self._plain | ours)
        spec = f"{self.node},{timeout_s},{SECOND},{mode}"
        return await client.spawn(self.run, self.cgroup, None, deadline=soon(), hardware=spec)

    def keeper(self, timeout_s: int = 2, mode: str = "required") -> AbstractAsyncContextManager[Bed]:
        return bed_around(self.run, self.cgroup, lambda: self.spawn(timeout_s, mode))


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("watchdog") / "device.so"
    try:
        subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", str(made), str(SOURCE), "-ldl"], check=True)
    except FileNotFoundError:
        pytest.skip("needs gcc, for a watchdog device that is none")
    return made


@pytest.fixture
def device(tmp_path: Path, own_cgroup: str, library: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    return StandIn(tmp_path, own_cgroup, library, monkeypatch)


def deadline_in(seconds: float) -> int:
    return int((boot_time() + seconds) * 1e9)


LOOKED_AT = ["open", "timeout 2", "magic", "close"]


async def test_it_runs_exactly_while_a_term_is_armed_and_is_petted_four_times_in_its_timeout(device: StandIn) -> None:
    async with device.keeper() as keeper:
        assert device.said() == LOOKED_AT  # at the start: will it do?
        hello = await keeper.call("hello")
        assert hello["hardware"] == {"device": str(device.node), "timeout_s": 2, "error": None}
        await keeper.call("arm", token=1, deadline_ns=deadline_in(600))
        await until(lambda: sum(call.what == "pet" for call in device.calls()) > 6, "pets")
        pets = [call.at_ns for call in device.calls() if call.what == "pet"]
        assert max(later - earlier for earlier, later in itertools.pairwise(pets)) < 2 * SECOND
        assert device.said() == [*LOOKED_AT, "open", "timeout 2", "pet"]
        await keeper.call("end", token=1, by_ns=deadline_in(5))
        assert device.said() == [*LOOKED_AT, "open", "timeout 2", "pet", "magic", "close"]
        await keeper.call("arm", token=2, deadline_ns=deadline_in(600))
        assert device.said()[-3:] == ["open", "timeout 2", "pet"]


async def test_without_a_supervisor_it_is_petted_for_no_longer_than_leaves_it_time_to_strike_and_the_switch_disarms_it(
    device: StandIn,
) -> None:
    async with device.keeper() as keeper:
        deadline = deadline_in(3)
        await keeper.call("arm", token=1, deadline_ns=deadline)
        await until(lambda: device.said()[-2:] == ["magic", "close"] and len(device.said()) > len(LOOKED_AT), "the end")
        calls = device.calls()
        last = max(call.at_ns for call in calls if call.what == "pet")
        assert last + 2 * SECOND <= deadline + SECOND  # it would strike before anybody else may claim
        assert deadline <= calls[-1].at_ns < deadline + SECOND


async def test_a_keeper_that_stands_still_is_struck_within_the_timeout(device: StandIn) -> None:
    """What the stand-in cannot do: it resets nothing. That nobody pets it any more is what makes a real one strike."""
    async with device.keeper() as keeper:
        await keeper.call("arm", token=1, deadline_ns=deadline_in(600))
        os.kill(keeper.pid, signal.SIGSTOP)
        stopped = boot_time()
        await asyncio.sleep(2.5)  # what must not happen has no event
        last = max(call.at_ns for call in device.calls() if call.what == "pet")
        os.kill(keeper.pid, signal.SIGCONT)
        assert last <= (stopped + 0.1) * SECOND
        assert device.said()[-1] == "pet", "still armed"


async def test_the_keeper_that_takes_the_place_of_a_killed_one_goes_on_petting(device: StandIn) -> None:
    async with device.keeper(timeout_s=6) as keeper:
        await keeper.call("arm", token=1, deadline_ns=deadline_in(600))
        os.kill(keeper.pid, signal.SIGKILL)
        await keeper.client.closed.wait()
        before = len(device.calls())
        async with bed_around(device.run, device.cgroup, lambda: device.spawn(6)) as successor:
            assert (await successor.call("hello"))["armed"]["token"] == 1
            assert [call.what for call in device.calls()[before:]][-1] == "pet"
            await successor.call("end", token=1, by_ns=deadline_in(5))
            assert device.said()[-2:] == ["magic", "close"]


@pytest.mark.parametrize(
    ("options", "timeout_s", "why"),
    [
        (CAN_SET_TIMEOUT, 2, "stops when the keeper is killed"),
        (ABLE, 90, "asked for a timeout of 90 s, it takes 60"),
        (MAGIC_CLOSE, 2, "none"),
    ],
)
async def test_a_device_that_will_not_do_is_refused_where_it_is_required_and_gone_without_where_not(
    device: StandIn, options: int, timeout_s: int, why: str
) -> None:
    device.options = options
    with pytest.raises(KeeperGone, match=why):
        await device.spawn(timeout_s)
    assert device.said()[-2:] == ["magic", "close"]
    async with device.keeper(timeout_s, "automatic") as keeper:
        assert why in (await keeper.call("hello"))["hardware"]["error"]
        await keeper.call("arm", token=1, deadline_ns=deadline_in(600))
        assert "pet" not in device.said()


@pytest.mark.parametrize("text", ["1\n", "", None])
async def test_a_device_that_could_not_be_stopped_is_not_even_opened(device: StandIn, text: str | None) -> None:
    if text is None:
        device.nowayout.unlink()
    else:
        device.nowayout.write_text(text)
    with pytest.raises(KeeperGone, match="nowayout"):
        await device.spawn()
    async with device.keeper(mode="automatic") as keeper:
        assert "nowayout" in (await keeper.call("hello"))["hardware"]["error"]
        await keeper.call("arm", token=1, deadline_ns=deadline_in(600))
    assert device.calls() == []


async def test_what_is_no_device_is_refused_and_stays_as_it_is(device: StandIn) -> None:
    device.node.unlink()
    device.node.write_text("precious")
    with pytest.raises(KeeperGone, match="it is not a device"):
        await device.spawn()
    assert device.node.read_text() == "precious"


@pytest.mark.parametrize("path", ["/dev/null", "/dev/watchdog"])
def test_the_real_sysfs_tells_what_is_no_watchdog(path: str) -> None:
    if path == "/dev/watchdog" and os.path.exists(path):
        pytest.skip("this machine has one, which is not for tests")
    with pytest.raises(OSError, match=r"sys/dev/char/1:3/nowayout: No such|No such file"):
        Hardware(Device(path, 2, SECOND))


async def test_a_device_that_another_has_taken_meanwhile_keeps_a_term_from_being_armed(device: StandIn) -> None:
    async with device.keeper() as keeper:
        with device.node.open("a") as other:
            import fcntl

            fcntl.flock(other, fcntl.LOCK_EX)
            with pytest.raises(KeeperRefused, match="something else uses it"):
                await keeper.call("arm", token=1, deadline_ns=deadline_in(600))
            hello = await keeper.call("hello")
            assert hello["armed"] is None
            assert "something else uses it" in hello["hardware"]["error"]
        await keeper.call("arm", token=2, deadline_ns=deadline_in(600))


async def test_a_term_that_cannot_be_armed_leaves_it_disarmed(device: StandIn) -> None:
    async with device.keeper() as keeper:
        await keeper.call("arm", token=2, deadline_ns=deadline_in(600))
        await keeper.call("end", token=2, by_ns=deadline_in(5))
        with pytest.raises(KeeperRefused, match="over"):
            await keeper.call("arm", token=1, deadline_ns=deadline_in(600))
        assert device.said()[-1] == "close"


def test_a_node_without_the_device_that_it_requires_says_so_and_never_leads(make_node: Make) -> None:
    node = make_node(ttl=LONG_TTL).after_an_orderly_end()
    node.config["hardware_watchdog"] = {"mode": "required", "device": str(node.folder / "none")}
    node.start()
    found = node.until(
        lambda: found if (found := node.status()) and "hardware" in str(found["unfit_because"]) else None
    )
    assert found["role"] == "unfit"
    assert f"hardware watchdog {node.folder / 'none'}: No such file" in str(found["unfit_because"])


@given(
    timeout_s=st.integers(1, 30),
    after_ms=st.integers(1000, 5000),
    refreshes=st.lists(st.integers(1, 20_000), max_size=6),
    lateness_ms=st.integers(0, 40),
)
def test_however_refreshes_come_it_strikes_after_the_switch_and_before_the_ttl(
    timeout_s: int, after_ms: int, refreshes: list[int], lateness_ms: int
) -> None:
    """Pets as the keeper's loop makes them, up to so late; then the refreshes stop."""
    device = Device("", timeout_s, after_ms * 10**6)
    now = petted = 100 * SECOND
    deadline = now + 40 * SECOND
    pending: Any = sorted(now + wait * 10**6 for wait in refreshes)
    while True:
        when = due(petted, deadline, device)
        if pending and (when is None or pending[0] <= when):
            now = max(now, pending.pop(0))
            deadline = max(deadline, now + 40 * SECOND)
            continue
        if when is None:
            break
        now = max(now, when + lateness_ms * 10**6)
        assert now < petted + timeout_s * SECOND + 10 * SECOND
        if now > last_pet(deadline, device):
            break
        petted = now
    strikes = petted + timeout_s * SECOND
    assert deadline < strikes <= deadline + device.after_ns
