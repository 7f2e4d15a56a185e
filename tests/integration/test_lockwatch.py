"""The lock files of a term under watch: a real keeper, real inotify; the poll is out of the way unless a test is
about it."""

import asyncio
import contextlib
import json
import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from election.clock import BootClock
from supervisor import flock, lockwatch, mutex
from supervisor.config.service import Service
from supervisor.lockwatch import LockWatch
from tests.bed.keeper import PATIENCE, Bed, until
from tests.bed.nodes import LONG_TTL, Make
from tests.bed.services import GPUWARD, spec

NEVER = 600.0
QUEUE = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())
SOON = PATIENCE
"""Seconds within which something that is noticed at once has been noticed; the poll of these tests comes later."""


class SteppedClock(BootClock):
    """The real one, and some hours."""

    ahead = 0.0

    def now(self) -> float:
        return super().now() + self.ahead


class Watched:
    """One GPU's lock file under watch."""

    def __init__(self, bed: Bed, services: dict[str, Service]) -> None:
        self.bed = bed
        self.path = bed.run / "gpu-0.lock"
        self.guard = Path(flock.guard_path(str(self.path)))
        self.notes: list[str] = []
        self.alarms: list[tuple[str, str]] = []
        self.clock = SteppedClock()
        self.life: asyncio.Task[None]
        self.watch = LockWatch(
            services, bed.client, self.clock, self.notes.append, lambda kind, text: self.alarms.append((kind, text))
        )
        seen = bed.client.on_event
        assert seen is not None

        def tell(event: dict[str, Any]) -> None:
            seen(event)
            self.watch.keeper_event(event)

        bed.client.on_event = tell

    async def rest(self) -> None:
        """Nothing is looked at any more, unless the test does."""
        self.life.cancel()
        await asyncio.gather(self.life, return_exceptions=True)

    async def begin(self) -> None:
        await self.bed.arm(1)
        self.lock = mutex.create(self.path, token=1, node="a")
        self.inode = os.fstat(self.lock.fd).st_ino
        await self.bed.call("locks", fds=(self.lock.fd,), token=1, locks=[{"gpu": 0, "path": str(self.path)}])
        self.watch.begin({0: self.lock})

    async def alarm(self, *parts: str, seconds: float = SOON) -> str:
        def look() -> str | None:
            return next((text for _, text in self.alarms if all(part in text for part in parts)), None)

        return await until(look, f"an alarm with {parts}; {self.alarms} {self.notes}", seconds)

    def whole(self) -> bool:
        return self.path.stat().st_ino == self.guard.stat().st_ino == self.inode

    def described(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.path.read_text())
        return found


@contextlib.asynccontextmanager
async def watched(bed: Bed, **services: Service) -> AsyncIterator[Watched]:
    """Under watch until the block ends."""
    found = Watched(bed, services)
    found.life = asyncio.create_task(found.watch.run())
    await asyncio.sleep(0)  # its inotify is open before the term begins
    await found.begin()
    try:
        yield found
    finally:
        await found.rest()
        for lock in await found.watch.end():
            lock.close()


@contextlib.contextmanager
def running(*command: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that has said its first line; it ends with its input."""
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.communicate()


@pytest.fixture(autouse=True)
def no_poll(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lockwatch, "POLL", NEVER)


@pytest_asyncio.fixture
async def one(weak_keeper: Bed) -> AsyncIterator[Watched]:
    async with watched(weak_keeper) as found:
        yield found


@pytest.mark.parametrize("victim", ["path", "guard"])
async def test_a_deleted_link_is_linked_back_at_once_and_alarmed(one: Watched, victim: str) -> None:
    name: Path = getattr(one, victim)
    os.unlink(name)
    await until(name.exists, "the link to be back", SOON)
    assert "the kernel does not say who" in (await one.alarm(str(name), "was deleted", "linked back")).lower()
    assert one.whole()
    assert {kind for kind, _ in one.alarms} == {"lock-file"}


async def test_a_replaced_file_gives_way_and_the_alarm_says_whose_it_was_and_who_had_it(one: Watched) -> None:
    other = one.bed.run / "other"
    with running("flock", "-n", str(other), "sh", "-c", "echo; exec cat") as holder:
        other.rename(one.path)
        await one.alarm(f"replaced by a file of uid {os.geteuid()}", f"pid {holder.pid} has locked")
    assert one.whole()


async def test_both_links_deleted_is_alarmed_and_no_new_file_is_made(one: Watched) -> None:
    await one.rest()  # else we may be quicker than the second deletion
    one.guard.unlink()
    one.path.unlink()
    await one.watch.look()
    await one.watch.look()
    assert "its second link were deleted" in one.alarms[0][1]
    assert list(one.bed.run.glob("*gpu-0.lock*")) == []
    assert len(one.alarms) == 1


async def test_what_a_stranger_writes_is_alarmed_with_the_writer_and_written_over(one: Watched) -> None:
    before = one.path.read_bytes()
    with running("sh", "-c", f"exec 9>>{one.path}; echo mine >&9; echo; exec cat") as writer:
        text = await one.alarm("was written to by somebody else", f"pid {writer.pid}")
    assert f"pid {one.bed.pid}" not in text
    await until(lambda: one.path.read_bytes() == before, "the description to be back", SOON)


@pytest.mark.parametrize("content", [b"", b"\xff\xfe not json", b"{}" * 5000])
async def test_any_content_is_written_over(one: Watched, content: bytes) -> None:
    before = one.path.read_bytes()
    one.path.write_bytes(content)
    await one.alarm("was written to by somebody else")
    await until(lambda: one.path.read_bytes() == before, "the description to be back", SOON)


async def test_what_the_keeper_writes_is_no_alarm_and_a_foreign_write_keeps_the_holder(one: Watched) -> None:
    for turn in range(5):
        await one.bed.start(1, f"s{turn}", "true", lock=0)
        await one.bed.event("empty", service=f"s{turn}")
        await one.bed.call("remove", service=f"s{turn}")
    started = await one.bed.start(1, "last", "sleep", "100", lock=0)
    await one.watch.look()
    assert one.alarms == []
    one.path.write_text("{}")
    await one.alarm("was written to by somebody else")
    holder = one.described()["holder"]
    assert (holder["service"], holder["pid"]) == ("last", started["pid"])


async def test_a_full_event_queue_leads_to_a_look_at_everything(one: Watched) -> None:
    """gorakhargosh/watchdog 654: an inotify overflow was ignored, and what it hid was never seen."""
    if QUEUE > 70000:
        pytest.skip(f"a queue of {QUEUE} events takes too long to fill")
    first, second = one.bed.run / "a", one.bed.run / "b"
    first.touch()
    for _ in range(QUEUE // 4 + 100):  # nothing else runs in this loop meanwhile: two renames are four events
        first.rename(second)
        second.rename(first)
    one.path.unlink()
    await one.alarm("was deleted")
    assert one.whole()
    assert "inotify lost events: every lock file is looked at anew" in one.notes


async def test_without_inotify_the_poll_repairs(weak_keeper: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(**_: Any) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(lockwatch, "Inotify", refused)
    monkeypatch.setattr(lockwatch, "POLL", 0.05)
    async with watched(weak_keeper) as one:
        one.path.unlink()
        await one.alarm("was deleted")
        assert one.whole()
        assert "no inotify" in one.notes[0]


async def test_the_same_finding_is_told_once_a_minute_and_repaired_each_time(one: Watched) -> None:
    for _ in range(3):
        one.path.unlink()
        await until(one.path.exists, "the link to be back", SOON)
        await one.watch.look()  # it has told the last one
    assert len(one.alarms) == 1
    one.clock.ahead += lockwatch.TOLD_AGAIN
    one.path.unlink()
    await one.alarm("2 more times since the last alarm")


async def test_after_the_term_a_deletion_is_nobodys_business(one: Watched) -> None:
    (lock,) = await one.watch.end()
    lock.remove()
    await one.watch.look()
    assert not one.path.exists()
    assert one.alarms == []


async def test_a_lock_held_too_long_is_told_once_for_each_limit_and_never_taken_away(one: Watched) -> None:
    started = await one.bed.start(1, "job", "sleep", "100", lock=0)
    await one.bed.event("lock-taken")
    for hours, notes, alarms in ((3.9, 0, 0), (0.2, 1, 0), (1.8, 1, 0), (0.2, 1, 1), (9, 1, 1)):
        one.clock.ahead += hours * 3600
        await one.watch.look()
        assert (len(one.notes), len(one.alarms)) == (notes, alarms), one.clock.ahead / 3600
    assert one.alarms[0][0] == "lock-held"
    assert f"job (pid {started['pid']}) for more than 6 h" in one.alarms[0][1]
    assert one.watch.holders()[0]["held_s"] > 15 * 3600
    assert one.whole()
    assert flock.flock_pid(*flock.inode_of(one.lock.fd)) == one.bed.pid


async def test_a_new_holder_is_counted_anew_and_a_free_lock_has_none(one: Watched) -> None:
    for name in ("a", "b"):
        await one.bed.start(1, name, "sleep", "100", lock=0)
        await one.bed.event("lock-taken", gpu=0)
        one.clock.ahead += 3 * 3600
        await one.watch.look()
        await one.bed.call("kill", service=name)
        await one.bed.event("empty", service=name)
        await one.bed.call("remove", service=name)
    assert one.watch.holders() == {}
    assert (one.notes, one.alarms) == ([], [])


async def test_max_hold_counts_for_a_lifetime_service_too(weak_keeper: Bed) -> None:
    held = spec("true", gpu=0, lock="lifetime", max_hold="30m")
    async with watched(weak_keeper, llm=held, free=spec("true", gpu=0, lock="lifetime")) as one:
        await one.bed.start(1, "llm", "sleep", "100", lock=0)
        await one.bed.event("lock-taken")
        one.clock.ahead = 1900
        await one.watch.look()
        assert "held by llm" in one.alarms[0][1]
        assert "1800 s" in one.alarms[0][1]


def test_a_node_repairs_its_lock_files_alarms_and_lists_the_holder(make_node: Make) -> None:
    node = make_node(ttl=LONG_TTL).after_an_orderly_end()
    node.add_service("llm", "sleep", "1000", gpu=0, lock="lifetime", gpu_fd="optional")
    node.add_service("next", "sleep", "1000", gpu=0, lock="lifetime", gpu_fd="optional", priority=-1)
    node.start()
    node.until(lambda: node.leads() and (node.status() or {}).get("gpus", [{}])[0]["lock"]["holder"])
    path = node.run / "gpu-0.lock"
    inode = path.stat().st_ino
    path.unlink()
    node.until(lambda: path.exists() and path.stat().st_ino == inode)
    alarm = node.until(lambda: (node.status() or {}).get("alarms"))[-1]
    assert alarm["kind"] == "lock-file"
    assert f"{path} was deleted" in alarm["text"]
    command = [GPUWARD, "lock", "list", "--config", str(node.folder / "gpuward.yml"), "--format", "json"]
    found = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    assert found[0]["holder"]["service"] == "llm"
    assert found[0]["holder"]["pid"] in node.service_pids()
    assert found[0]["held_s"] >= 0
    assert found[0]["waiting"] == ["next"]
