"""The end of a service's log file: any bytes, lines of any length, a bounded read. It blocks: use a thread."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from supervisor.files import open_owned

MOST_LINES = 512
MOST_BYTES = 2 * 1024 * 1024
"""Read for one answer, whatever the lines are like: ten of 200 KB, or all of an ordinary 512."""


@dataclass(frozen=True)
class Place:
    """Where in which file a reader is; another inode is another file (rotated, or made anew)."""

    inode: int
    offset: int

    @classmethod
    def parse(cls, text: str) -> "Place":
        """Raises ValueError for what `__str__` never gives."""
        match = re.fullmatch(r"([0-9]{1,20})-([0-9]{1,20})", text, re.ASCII)
        if match is None:
            raise ValueError("not a place in a log file")
        return cls(int(match[1]), int(match[2]))

    def __str__(self) -> str:
        return f"{self.inode}-{self.offset}"


@dataclass(frozen=True)
class Piece:
    """Lines without their ends; what is not UTF-8 is replaced."""

    lines: list[str]
    unfinished: str
    """What stands after the last line end; only of a read from the end."""
    cut: bool
    """Some of what was asked for is missing: it is beyond MOST_BYTES from the end."""
    place: Place
    """After the last line end that was read."""


def last_lines(path: Path, count: int) -> Piece:
    """At most `count` lines from the end, an unfinished one counted. No file: no lines. OSError: it cannot be read."""
    return _read(path, count, None)


def lines_after(path: Path, place: Place) -> Piece:
    """The whole lines since `place`; of another file than that one, from its beginning."""
    return _read(path, None, place)


def _read(path: Path, count: int | None, after: Place | None) -> Piece:
    try:
        fd = open_owned(path)
    except FileNotFoundError:
        return Piece([], "", False, Place(0, 0))
    try:
        found = os.fstat(fd)
        begin = 0
        if after is not None and after.inode == found.st_ino and after.offset <= found.st_size:
            begin = after.offset
        start = max(begin, found.st_size - MOST_BYTES)
        data = _pread(fd, start, found.st_size - start)
    finally:
        os.close(fd)
    return _piece(data, start, found.st_ino, count, cut=start > begin)


def _pread(fd: int, start: int, size: int) -> bytes:
    parts = []
    while size > 0 and (part := os.pread(fd, size, start)):
        parts.append(part)
        start, size = start + len(part), size - len(part)
    return b"".join(parts)


def _piece(data: bytes, start: int, inode: int, count: int | None, *, cut: bool) -> Piece:
    whole = data.rfind(b"\n") + 1
    if whole == 0 and len(data) == MOST_BYTES:
        whole = len(data)  # no line end in all of it: given as it is, else a follower would wait for ever
    rest = data[whole:]
    lines = data[:whole].removesuffix(b"\n").split(b"\n") if whole else []
    if cut and len(lines) > 1:
        lines = lines[1:]  # the first one is the end of a line
    if count is not None:
        keep = count - bool(rest)
        cut = cut and len(lines) < keep
        lines = lines[-keep:] if keep else []
    return Piece([_text(line) for line in lines], _text(rest), cut, Place(inode, start + whole))


def _text(line: bytes) -> str:
    return line.removesuffix(b"\r").decode("utf-8", "replace")
