"""Reading a service's log: any bytes, lines of any length, over its copies, within bounds. It blocks: use a thread.

The file is cut in place while it is written (supervisor/service/logfile.py), so an offset in it says little. A place is
counted from the end of the copy just before the live file. That boundary outlasts every rotation: the copy keeps its
inode and mtime, whatever its name, and what follows it is in the next one. In any case the bytes before the place must
be the ones that were there.
"""

import os
import re
import zlib
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from election.clock import boot_time
from supervisor.files import open_owned
from supervisor.service.logfile import Part, at_rest, parts

MOST_LINES = 512
MOST_BYTES = 2 * 1024 * 1024
"""Read for one answer, whatever the lines are like: ten of 200 KB, or all of an ordinary 512."""
PATIENCE = 0.5
"""Seconds to wait for a cut; it takes milliseconds."""
CHECKED = 4096
"""Bytes before a place by which it is known again."""


@dataclass(frozen=True)
class Place:
    """Where in a log a reader is."""

    log: int
    """Inode of the live file: another one is another log. 0: there was none."""
    copy: int
    """Mark of the copy just before the live file. 0: there was none."""
    offset: int
    """From the end of that copy; below 0 in it or before it."""
    check: int
    """CRC-32 of the bytes before it, CHECKED at most and none of that copy."""

    @classmethod
    def parse(cls, text: str) -> "Place":
        """Raises ValueError for what `__str__` never gives."""
        match = re.fullmatch(r"([0-9]{1,20})\.([0-9]{1,10})\.(-?[0-9]{1,20})\.([0-9]{1,10})", text, re.ASCII)
        if match is None:
            raise ValueError("not a place in a log")
        return cls(*(int(number) for number in match.groups()))

    def __str__(self) -> str:
        return f"{self.log}.{self.copy}.{self.offset}.{self.check}"


@dataclass(frozen=True)
class Piece:
    """Lines without their ends; what is not UTF-8 is replaced."""

    lines: list[str]
    unfinished: str
    """What stands after the last line end; only of a read from the end."""
    cut: bool
    """Some of what was asked for is missing: it is beyond MOST_BYTES from the end, or gone."""
    place: Place
    """After the last line end that was read."""


def last_lines(path: Path, count: int) -> Piece:
    """At most `count` lines from the end, an unfinished one counted. No file: no lines. OSError: it cannot be read."""
    with at_rest(boot_time() + PATIENCE):
        try:
            log = _Log(*parts(path))
        except FileNotFoundError:
            return Piece([], "", False, Place(0, 0, 0, 0))
        piece = _read(log, log.begin, cut=log.lost)
    keep = count - bool(piece.unfinished)
    lines = piece.lines[-keep:] if keep else []
    return Piece(lines, piece.unfinished, piece.cut and len(lines) < keep, piece.place)


def lines_after(path: Path, place: Place) -> Piece:
    """The whole lines since `place`. It is not to be found: `cut`, and all that may have come since."""
    with at_rest(boot_time() + PATIENCE):
        try:
            log = _Log(*parts(path))
        except FileNotFoundError:
            return Piece([], "", False, place)
        start, exact = log.find(place)
        fresh = place.log != log.inode and place.copy == log.copy
        return _read(log, start, cut=not exact, fresh=fresh)


class _Log:
    """All parts of a log as one. 0 is where the live file begins, below it is what was cut off."""

    def __init__(self, found: list[Part], lost: bool) -> None:
        *older, live = found
        self.lost = lost
        self.begin = -sum(part.size for part in older)
        self.end = live.size
        self.inode = live.mark
        self.copy = older[-1].mark if older else 0
        """As in a place of now."""
        self._parts = list(zip(found, accumulate((part.size for part in found), initial=self.begin), strict=False))
        self._ends = {part.mark: at + part.size for part, at in self._parts[:-1]} or {0: 0}

    def read(self, start: int, end: int) -> bytes:
        return b"".join(
            _pread(part, max(start - at, 0), min(end - at, part.size))
            for part, at in self._parts
            if start < at + part.size and at < end
        )

    def place(self, at: int) -> Place:
        return Place(self.inode, self.copy, at, self._check(at, at))

    def find(self, place: Place) -> tuple[int, bool]:
        """Where to read on, and is that exactly this place? If not: where nothing is read that has been read before."""
        if place.log == 0:
            return 0, 0 in self._ends
        boundary = self._ends.get(place.copy)
        at = (self.begin if boundary is None else boundary) + place.offset
        known = boundary is not None or place.offset > 0  # else nothing could prove it
        there = known and place.log == self.inode and self.begin <= at <= self.end
        if there and self._check(at, place.offset) == place.check:
            return at, True
        return self.begin if boundary is None else 0, False

    def _check(self, at: int, offset: int) -> int:
        return zlib.crc32(self.read(at - min(max(offset, 0), CHECKED), at))


def _pread(part: Part, start: int, end: int) -> bytes:
    fd = open_owned(part.path)
    try:
        data = []
        while start < end and (some := os.pread(fd, end - start, part.begin + start)):
            data.append(some)
            start += len(some)
        return b"".join(data)
    finally:
        os.close(fd)


def _read(log: _Log, begin: int, *, cut: bool, fresh: bool = False) -> Piece:
    """`cut`: not all that was asked for begins at `begin`. `fresh`: there begins a line, whatever is before it."""
    start = max(begin, log.end - MOST_BYTES)
    cut = cut or start > begin
    data = log.read(start, log.end)
    whole = data.rfind(b"\n") + 1
    if whole == 0 and len(data) == MOST_BYTES:
        whole = len(data)  # no line end in all of it: given as it is, else a follower would wait for ever
    lines = data[:whole].removesuffix(b"\n").split(b"\n") if whole else []
    if cut and len(lines) > 1 and not (fresh and start == begin) and log.read(start - 1, start) != b"\n":
        lines = lines[1:]  # the first one is the end of a line
    return Piece([_text(line) for line in lines], _text(data[whole:]), cut, log.place(start + whole))


def _text(line: bytes) -> str:
    return line.removesuffix(b"\r").decode("utf-8", "replace")
