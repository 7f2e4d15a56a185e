"""The node's memory of its terms, in files.

State folder (survives a reboot):
    journal.json   {"instances": [{"instance", "boot_id", "home"}]}  the latest 32, written before a claim is sent
    floor.json     {"token": n, "revision": n}  the highest fencing token ever seen, the store's revision (rules 6, 21)
Run folder (gone after a reboot):
    term.json      {"boot_id", "home", "ttl_s", "instance", "token", "lease", "began", "end_begun"}   (rules 11, 15)

A file that cannot be read is set aside under a name of its own and reported; it is never trusted and never fatal.
"""

import asyncio
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from election.events import Term
from election.memory import Remembered
from election.phases import GONE_KEPT
from supervisor.files import parse_json, read_at_most, write_atomically

T = TypeVar("T")
ROW = ("instance", "boot_id", "home")
Claim = tuple[str, str, str]
"""One claim: the values of `ROW`."""
NONE: tuple[Claim, ...] = ()
LARGEST = 64 * 1024
"""Bytes read of such a file; ours stay under 2 KiB."""


class FileMemory:
    """`Memory` in two folders, which must exist. `report` is told of files that were set aside.

    `home` names the cluster, node, run folder and cgroup: what an earlier claim of another home left running, this
    node neither sees nor ends, so such a claim is kept in the journal and never counted as gone.
    """

    def __init__(
        self, state: Path, run: Path, boot_id: str, home: str, ttl: int, report: Callable[[str], None]
    ) -> None:
        self._journal = state / "journal.json"
        self._floor = state / "floor.json"
        self._term = run / "term.json"
        self._boot_id, self._home, self._ttl = boot_id, home, ttl
        self._report = report
        self._claims: tuple[Claim, ...] = ()
        self._highest, self._revision = 0, 0
        self._present: dict[str, Any] | None = None
        self._turn = threading.Lock()
        self.this_boot_is_gone = True
        """Is nothing left of this boot's earlier terms? If that cannot be proven they count as running (rule 8c)."""
        self.resumed_from: float | None = None
        """The last term goes on: its last refresh was sent at this moment (`Remembered`)."""

    async def load(self) -> Remembered:
        return await asyncio.to_thread(self._load)

    def _load(self) -> Remembered:
        self._claims = self._read(self._journal, _parse_claims, NONE)[-GONE_KEPT:]
        self._highest, self._revision = self._read(self._floor, _parse_floor, (0, 0))
        found = self._read(self._term, self._parse_term, None)
        term, sure, resumed = None if found is None else found[0], self.this_boot_is_gone, self.resumed_from
        mine = [claim for claim in self._claims if claim[2] == self._home]
        gone = tuple(instance for instance, boot_id, _ in mine if sure or boot_id != self._boot_id)
        if resumed is not None and term is not None:
            others = tuple(i for i in gone if i != term.instance)
            return Remembered(others, self._highest, term, resumed, self._revision)
        return Remembered(gone, self._highest, term if sure else None, revision=self._revision)

    async def resumable(self) -> tuple[Term, int] | None:
        """A term of this boot, home and TTL whose end was not begun, and the highest token ever seen."""
        return await asyncio.to_thread(self._resumable)

    def _resumable(self) -> tuple[Term, int] | None:
        found = self._read(self._term, self._parse_term, None)
        return (found[0], self._read(self._floor, _parse_floor, (0, 0))[0]) if found is not None and found[1] else None

    def _parse_term(self, value: Any) -> tuple[Term, bool] | None:
        """The term, and whether it may go on as far as this file tells."""
        if value["boot_id"] != self._boot_id:
            return None
        term = Term(str(value["instance"]), int(value["token"]), int(value["lease"]), str(value["began"]))
        same = (value.get("home"), value.get("ttl_s")) == (self._home, self._ttl)
        return term, same and value.get("end_begun") is False

    async def note_claim(self, instance: str) -> None:
        self._claims = (*self._claims, (instance, self._boot_id, self._home))[-GONE_KEPT:]
        await asyncio.to_thread(self._write, self._journal, self._journal_now)

    async def note_token(self, token: int) -> None:
        if token > self._highest:
            self._highest = token
            await asyncio.to_thread(self._write, self._floor, self._floor_now)

    async def note_revision(self, revision: int) -> None:
        self._revision = revision
        await asyncio.to_thread(self._write, self._floor, self._floor_now)

    def _floor_now(self) -> dict[str, int]:
        return {"token": self._highest, "revision": self._revision}

    async def note_term(self, term: Term) -> None:
        self._present = self._term_record(term, end_begun=False)
        await asyncio.to_thread(self._write, self._term, lambda: self._present)

    async def note_end_begun(self, term: Term) -> None:
        self._present = self._term_record(term, end_begun=True)
        await asyncio.to_thread(self._write, self._term, lambda: self._present)

    async def forget_term(self) -> None:
        self._present = None
        await asyncio.to_thread(self._write, self._term, lambda: self._present)

    def _journal_now(self) -> dict[str, Any]:
        return {"instances": [dict(zip(ROW, claim, strict=True)) for claim in self._claims]}

    def _term_record(self, term: Term, *, end_begun: bool) -> dict[str, Any]:
        return {
            "boot_id": self._boot_id,
            "home": self._home,
            "ttl_s": self._ttl,
            "instance": term.instance,
            "token": term.token,
            "lease": term.lease,
            "began": term.began,
            "end_begun": end_begun,
        }

    def _write(self, path: Path, value: Callable[[], dict[str, Any] | None]) -> None:
        """What is true when it is this thread's turn: a write that a slow disk held up must not undo a later one."""
        with self._turn:
            now = value()
            if now is None:
                path.unlink(missing_ok=True)
            else:
                write_atomically(path, json.dumps(now).encode())

    def _read(self, path: Path, parse: Callable[[Any], T], missing: T) -> T:
        try:
            return parse(parse_json(read_at_most(path, LARGEST)))
        except FileNotFoundError:
            return missing
        except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
            aside = path.with_name(f"{path.name}.damaged-{os.urandom(4).hex()}")
            try:
                path.rename(aside)
                kept = f"set aside as {aside.name}"
            except OSError as failed:
                kept = f"could not be set aside: {failed}"
            self._report(f"{path}: cannot be read ({type(error).__name__}: {error}); {kept}")
            return missing


def _parse_floor(value: Any) -> tuple[int, int]:
    return int(value["token"]), int(value.get("revision", 0))


def _parse_claims(value: Any) -> tuple[Claim, ...]:
    return tuple((str(row["instance"]), str(row["boot_id"]), str(row["home"])) for row in value["instances"])
