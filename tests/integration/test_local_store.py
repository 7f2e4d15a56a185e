"""What only the store in a file must stand: other programs' files, reboots, several processes, a bad disk."""

import asyncio
import os
import shutil
import sqlite3
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, aclosing, closing
from pathlib import Path

import pytest

from election.clock import BootClock
from election.store import Change, ErrorClass, ModIs, Put, StoreError, Txn
from election.stores import local_file
from election.stores.local import LocalStore
from tests.bed.keeper import PATIENCE
from tests.integration.claimant import CLAIMED, TAKEN

CLOCK = BootClock()


def soon(seconds: float = PATIENCE) -> float:
    return CLOCK.now() + seconds


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "lock.db"


@pytest.fixture
async def store(path: Path) -> AsyncIterator[LocalStore]:
    store = LocalStore(path, clock=CLOCK)
    yield store
    await store.close()


async def put(store: LocalStore, key: str, value: bytes = b"x", lease: int = 0, within: float = PATIENCE) -> int:
    return (await store.commit(Txn((), (Put(key, value, lease),)), deadline=soon(within))).revision


async def refusal(store: LocalStore, within: float = PATIENCE) -> StoreError:
    with pytest.raises(StoreError) as caught:
        await put(store, "/a", within=within)
    return caught.value


async def test_the_file_is_for_its_owner_alone_whatever_the_umask(store: LocalStore, path: Path) -> None:
    before = os.umask(0)
    try:
        await put(store, "/a")
    finally:
        os.umask(before)
    for file in path.parent.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, file
    assert {file.name for file in path.parent.iterdir()} <= {"lock.db", "lock.db-wal", "lock.db-shm"}


def foreign(path: Path, kind: str) -> None:
    match kind:
        case "text":
            path.write_text("important notes\n" * 100)
        case "database":
            with closing(sqlite3.connect(path)) as db:
                db.execute("CREATE TABLE notes (text)")
        case "symlink":
            path.symlink_to(path.with_name("elsewhere"))
        case "folder":
            path.mkdir()
        case _:
            path.write_bytes(b"")
    if kind in ("text", "database"):
        path.chmod(0o600)


def contents(folder: Path) -> dict[str, bytes | None]:
    return {file.name: file.read_bytes() if file.is_file() else None for file in folder.iterdir()}


@pytest.mark.parametrize("kind", ["text", "database", "symlink", "folder", "readable by others"])
async def test_a_file_that_is_not_ours_is_refused_and_left_as_it_is(store: LocalStore, path: Path, kind: str) -> None:
    foreign(path, kind)
    before = contents(path.parent)
    error = await refusal(store)
    assert error.kind is ErrorClass.UNSUPPORTED
    assert not error.sent
    assert str(path) in str(error)
    assert contents(path.parent) == before


async def test_a_file_of_a_newer_version_is_refused(store: LocalStore, path: Path) -> None:
    await put(store, "/a")
    await store.close()
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA user_version = 2")
    newer = LocalStore(path, clock=CLOCK)
    error = await refusal(newer)
    assert "schema version 2, expected 1" in str(error)
    assert error.kind is ErrorClass.UNSUPPORTED
    await newer.close()


async def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "missing" / "lock.db", clock=CLOCK)
    error = await refusal(store)
    assert error.kind is ErrorClass.UNSUPPORTED
    assert "missing/lock.db" in str(error)
    await store.close()


async def test_a_reboot_ends_every_lease_and_keeps_everything_else(store: LocalStore, path: Path) -> None:
    lease = (await store.grant(90, deadline=soon())).lease
    await put(store, "/leader", lease=lease)
    last = await put(store, "/term")
    await store.close()
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("UPDATE state SET boot_id = 'the boot before'")
    rebooted = LocalStore(path, clock=CLOCK)
    snapshot = await rebooted.read(["/"], prefix=True, deadline=soon())
    assert [entry.key for entry in snapshot.entries] == ["/term"]
    assert snapshot.revision == last + 1
    with pytest.raises(StoreError) as caught:
        await rebooted.keepalive(lease, deadline=soon())
    assert caught.value.kind is ErrorClass.LOST
    await rebooted.close()


async def test_a_locked_file_is_transient_at_the_deadline_and_works_again_afterwards(
    store: LocalStore, path: Path
) -> None:
    await put(store, "/a")
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("BEGIN IMMEDIATE")
        start = CLOCK.now()
        error = await refusal(store, within=0.3)
        assert 0.25 < CLOCK.now() - start < 10
        assert error.kind is ErrorClass.TRANSIENT
        assert (await store.read(["/a"], deadline=soon())).get("/a") is not None
    await put(store, "/a")


def damage(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(os.urandom(path.stat().st_size - 4096))


async def test_a_damaged_file_is_unsupported_and_named(store: LocalStore, path: Path) -> None:
    await put(store, "/a")
    await store.close()
    damage(path)
    damaged = LocalStore(path, clock=CLOCK)
    error = await refusal(damaged)
    assert error.kind is ErrorClass.UNSUPPORTED
    assert str(path) in str(error)
    await damaged.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
    if os.geteuid() != 0 or not shutil.which("mount") or subprocess.run(command, check=False).returncode != 0:
        pytest.skip("needs the right to mount a small tmpfs")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass


async def test_a_full_disk_is_no_space_and_nothing_is_half_written(small_disk: Path) -> None:
    store = LocalStore(small_disk / "lock.db", clock=CLOCK)
    try:
        await put(store, "/a", b"before")
        filler = small_disk / "filler"
        with pytest.raises(OSError, match="No space"):
            fill(filler)
        with pytest.raises(StoreError) as caught:
            await put(store, "/a", bytes(100_000))
        assert caught.value.kind is ErrorClass.NO_SPACE
        assert (entry := (await store.read(["/a"], deadline=soon())).get("/a")) is not None
        assert entry.value == b"before"
        filler.unlink()
        await put(store, "/a", b"after")
    finally:
        await store.close()


async def test_after_the_file_was_removed_nobody_goes_on_with_the_old_one(store: LocalStore, path: Path) -> None:
    lease = (await store.grant(90, deadline=soon())).lease
    revision = await put(store, "/leader", lease=lease)
    for file in path.parent.iterdir():
        file.unlink()
    other = LocalStore(path, clock=CLOCK)
    txn = Txn((ModIs("/leader", 0),), (Put("/leader", b"other"),))
    assert (await other.commit(txn, deadline=soon())).succeeded
    with pytest.raises(StoreError) as caught:
        await store.keepalive(lease, deadline=soon())
    assert caught.value.kind is ErrorClass.LOST
    guarded = Txn((ModIs("/leader", revision + 1),), (Put("/leader", b"mine"),))
    assert not (await store.commit(guarded, deadline=soon())).succeeded
    await other.close()


async def test_an_expiry_is_heard_and_not_before_its_time(store: LocalStore) -> None:
    lease = (await store.grant(3, deadline=soon())).lease
    granted = CLOCK.now()
    revision = await put(store, "/a", lease=lease)
    async with aclosing(store.watch("/")) as watch, asyncio.timeout(PATIENCE):
        assert await anext(watch) is None
        assert await anext(watch) == Change("/a", revision + 1, None, 0, revision)
        assert CLOCK.now() - granted > 2.9


async def test_a_watch_that_fell_behind_what_is_kept_says_so(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_file, "KEPT_EVENTS", 5)
    async with aclosing(store.watch("/")) as watch, asyncio.timeout(PATIENCE):
        assert await anext(watch) is None
        for _ in range(10):
            await put(store, "/a")
        assert await anext(watch) is None
        revision = await put(store, "/b")
        assert await anext(watch) == Change("/b", revision, b"x", 0, 0)


async def test_calls_that_waited_behind_a_slow_one_beyond_their_deadline_are_never_applied(
    store: LocalStore, path: Path
) -> None:
    before = await put(store, "/a")
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("BEGIN IMMEDIATE")
        slow = asyncio.create_task(put(store, "/a"))
        await asyncio.sleep(0)
        errors = await asyncio.gather(*(refusal(store, within=0.2) for _ in range(4)))
    assert [error.sent for error in errors] == [False] * 4
    assert await slow == before + 1
    assert (await store.read(["/a"], deadline=soon())).revision == before + 1


def test_processes_that_make_the_file_at_the_same_moment_agree_on_one_winner(path: Path) -> None:
    command = [sys.executable, "-m", "tests.integration.claimant", str(path)]
    with ExitStack() as ends:  # each ends with its input
        claimants = [ends.enter_context(subprocess.Popen(command, stdin=-1, stdout=-1, text=True)) for _ in range(6)]
        assert [outcome(process) for process in claimants] == ["ready"] * 6
        for process in claimants:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        outcomes = [outcome(process) for process in claimants]
    assert sorted(outcomes) == [CLAIMED, *[TAKEN] * 5]


def outcome(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()
