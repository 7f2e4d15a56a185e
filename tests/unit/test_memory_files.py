"""The memory of terms in files: whole or absent, never trusted when damaged, never fatal (rules 6, 8c, 11, 15)."""

import asyncio
import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from election.events import Term
from election.memory import Remembered
from election.phases import GONE_KEPT
from supervisor import files
from supervisor import memory as memory_module
from supervisor.memory import LARGEST, FileMemory

TERM = Term("me", 50, 7, "then")
NOTHING = Remembered((), 0, None)


@dataclass
class Folders:
    state: Path
    run: Path
    reports: list[str] = field(default_factory=list)

    def memory(self, boot_id: str = "boot1") -> FileMemory:
        """As a newly started supervisor has it."""
        return FileMemory(self.state, self.run, boot_id, "home", 9, self.reports.append)

    def path(self, name: str) -> Path:
        return (self.run if name == "term.json" else self.state) / name

    def names(self) -> list[str]:
        return sorted(path.name for folder in (self.state, self.run) for path in folder.iterdir())


@pytest.fixture
def folders(tmp_path: Path) -> Folders:
    made = Folders(tmp_path / "state", tmp_path / "run")
    made.state.mkdir()
    made.run.mkdir()
    return made


async def fill(folders: Folders) -> None:
    memory = folders.memory()
    await memory.load()
    await memory.note_claim("me")
    await memory.note_token(50)
    await memory.note_term(TERM)


async def test_files_that_are_missing_are_an_empty_memory_and_no_fault(folders: Folders) -> None:
    assert await folders.memory().load() == NOTHING
    assert folders.reports == []


async def test_what_was_noted_is_found_by_the_next_supervisor(folders: Folders) -> None:
    await fill(folders)
    assert await folders.memory().load() == Remembered(("me",), 50, TERM)
    assert folders.reports == []


async def test_a_term_of_another_boot_is_none_of_this_boot_and_no_fault(folders: Folders) -> None:
    """Rule 15; journal and token floor outlive the boot (rules 6, 8c)."""
    await fill(folders)
    assert await folders.memory("boot2").load() == Remembered(("me",), 50, None)
    assert folders.reports == []


async def test_a_claim_is_on_disk_when_the_call_returns(folders: Folders) -> None:
    """Rule 8c."""
    memory = folders.memory()
    await memory.load()
    await memory.note_claim("first")
    assert b'"first"' in folders.path("journal.json").read_bytes()


async def test_the_journal_goes_on_after_a_restart_and_keeps_the_latest(folders: Folders) -> None:
    for number in range(GONE_KEPT + 3):
        memory = folders.memory()
        await memory.load()
        await memory.note_claim(f"i{number}")
    found = (await folders.memory().load()).instances
    assert len(found) == GONE_KEPT
    assert found[-1] == f"i{GONE_KEPT + 2}"


async def test_the_highest_token_never_falls(folders: Folders) -> None:
    """Rule 6."""
    memory = folders.memory()
    await memory.load()
    await memory.note_token(50)
    await memory.note_token(40)
    assert (await folders.memory().load()).floor == 50
    again = folders.memory()
    await again.load()
    await again.note_token(45)
    assert (await folders.memory().load()).floor == 50


async def test_an_end_that_has_begun_is_marked_and_a_term_that_is_over_forgotten(folders: Folders) -> None:
    """Rule 11."""
    await fill(folders)
    memory = folders.memory()
    await memory.note_end_begun(TERM)
    assert json.loads(folders.path("term.json").read_bytes())["end_begun"] is True
    assert (await folders.memory().load()).term == TERM, "its end may not be on record yet"
    await memory.forget_term()
    await memory.forget_term()
    assert (await folders.memory().load()).term is None


DAMAGE = {
    "empty": b"",
    "cut": b'{"token": 5',
    "no object": b"[1, 2]",
    "null": b"null",
    "other fields": b'{"colour": "green"}',
    "wrong kind": b'{"token": [], "instances": 5, "boot_id": "boot1", "instance": 1, "lease": {}, "began": 1}',
    "infinite": b'{"token": Infinity, "instances": Infinity, "boot_id": "boot1", "instance": "x"}',
    "no text": b"\xff\xfe\x00\x01",
    "zeros after a power cut": bytes(512),
    "deep": b"[" * 50_000,
    "too long": b" " * LARGEST + b"{}",
}


@pytest.mark.parametrize("name", ["journal.json", "floor.json", "term.json"])
@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
async def test_a_damaged_file_is_set_aside_reported_and_spoils_nothing_else(
    folders: Folders, name: str, damage: bytes
) -> None:
    await fill(folders)
    folders.path(name).write_bytes(damage)
    found = await folders.memory().load()
    sound = Remembered(("me",), 50, TERM)
    spoilt = {"journal.json": "instances", "floor.json": "floor", "term.json": "term"}[name]
    for part in ("instances", "floor", "term"):
        expected = NOTHING if part == spoilt else sound
        assert getattr(found, part) == getattr(expected, part), part
    (report,) = folders.reports
    assert report.startswith(f"{folders.path(name)}: cannot be read")
    (aside,) = [path for path in folders.path(name).parent.iterdir() if ".damaged-" in path.name]
    assert aside.read_bytes() == damage
    assert aside.name in report
    assert await folders.memory().load() == found
    assert len(folders.reports) == 1, "reported once"


async def test_after_damage_the_memory_works_on(folders: Folders) -> None:
    await fill(folders)
    for name in ("journal.json", "floor.json", "term.json"):
        folders.path(name).write_bytes(b"garbage")
    memory = folders.memory()
    await memory.load()
    await memory.note_claim("next")
    await memory.note_token(51)
    await memory.note_term(TERM)
    assert await folders.memory().load() == Remembered(("next",), 51, TERM)


def link(path: Path) -> None:
    target = path.with_name("elsewhere")
    path.rename(target)
    path.symlink_to(target)


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("replace", [link, folder])
async def test_what_is_no_plain_file_of_ours_is_not_trusted(folders: Folders, replace: Callable[[Path], None]) -> None:
    await fill(folders)
    replace(folders.path("floor.json"))
    assert (await folders.memory().load()).floor == 0
    assert len(folders.reports) == 1


async def test_a_write_that_fails_leaves_the_old_file_whole(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    """mikopbx/Core 1051: a full disk."""
    await fill(folders)

    def full(fd: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    memory = folders.memory()
    await memory.load()
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        with pytest.raises(OSError, match="No space left"):
            await memory.note_claim("next")
        with pytest.raises(OSError, match="No space left"):
            await memory.note_term(Term("next", 60, 8, ""))
    assert await folders.memory().load() == Remembered(("me",), 50, TERM)
    assert folders.names() == ["floor.json", "journal.json", "term.json"], "nothing half-written is left"


async def test_only_the_owner_may_read_the_files(folders: Folders) -> None:
    await fill(folders)
    for name in ("journal.json", "floor.json", "term.json"):
        assert folders.path(name).stat().st_mode & 0o777 == 0o600


async def test_two_writes_at_once_leave_the_higher_token_and_a_whole_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rule 6. A slow disk: the second write is asked for while the first is still under way."""
    real, first = files.write_atomically, threading.Event()

    def slow_first(path: Path, data: bytes, mode: int = 0o600) -> None:
        if not first.is_set():
            first.set()
            time.sleep(0.2)
        real(path, data, mode)

    monkeypatch.setattr(memory_module, "write_atomically", slow_first)
    memory = FileMemory(tmp_path, tmp_path, "boot1", "home", 9, print)
    await memory.load()
    await asyncio.gather(memory.note_token(40), memory.note_token(50))
    assert (await FileMemory(tmp_path, tmp_path, "boot1", "home", 9, print).load()).floor == 50
    assert os.listdir(tmp_path) == ["floor.json"]


async def test_terms_of_this_boot_count_as_running_where_their_end_cannot_be_proven(tmp_path: Path) -> None:
    """Rule 8c in weak containment goes by the boot id alone."""
    for boot, instance in (("boot1", "old"), ("boot2", "new")):
        memory = FileMemory(tmp_path, tmp_path, boot, "home", 9, print)
        await memory.load()
        await memory.note_claim(instance)
    await memory.note_term(Term("new", 7, 1))
    again = FileMemory(tmp_path, tmp_path, "boot2", "home", 9, print)
    assert (await again.load()).instances == ("old", "new")
    again.this_boot_is_gone = False
    found = await again.load()
    assert found.instances == ("old",)
    assert found.term is None


async def test_a_term_is_resumable_only_for_the_same_boot_home_and_ttl_and_before_its_end(folders: Folders) -> None:
    """Rule 15."""
    await fill(folders)
    assert await folders.memory().resumable() == (TERM, 50)
    assert await folders.memory("boot2").resumable() is None
    args = (folders.state, folders.run, "boot1")
    assert await FileMemory(*args, "elsewhere", 9, folders.reports.append).resumable() is None
    assert await FileMemory(*args, "home", 90, folders.reports.append).resumable() is None
    await folders.memory().note_end_begun(TERM)
    assert await folders.memory().resumable() is None


async def test_a_resumed_term_is_none_that_is_gone(folders: Folders) -> None:
    await fill(folders)
    memory = folders.memory()
    memory.resumed_from = 3.0
    assert await memory.load() == Remembered((), 50, TERM, 3.0)
