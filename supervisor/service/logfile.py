"""Logs that do not grow for ever, without standing between a service and its file.

A service writes straight to NAME.log (O_APPEND); nothing is asked of it, and nothing of it is waited for. When the file
is too long its head, in whole blocks, is copied to NAME.log.1 and then cut off the file in place:

    copied to .NAME.log.copying → fsync → renamed to .NAME.log.pending → the head is cut off → older copies are
    shifted → .pending becomes NAME.log.1

Which cut is possible depends on the file system (fallocate(2)); they are tried in this order:

    collapse   ext4, XFS, f2fs      what follows the head moves to the front; nothing is lost
    punch      tmpfs, Btrfs, others the head becomes a hole without blocks; nothing is lost, the length keeps growing
    truncate   vfat, 9p, others     what is written between the last read and the cut, µs to some ms, is lost

Killed at any step: nothing is lost and nothing is there twice. What is left tells how far it came: while the file still
begins with the bytes of .pending it has not been cut yet. (So a kill between the cut and the renames, and a file that
has grown since by the very same bytes, would lose these.)

A line can begin in one file and end in the next: read together, in order, they are complete. `parts` tells the order.
It holds `at_rest`, which keeps cut and renames out; what a killed rotation has left is at rest.
"""

import contextlib
import ctypes
import errno
import os
import re
import stat
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from election.clock import Clock, boot_time
from supervisor.config.service import Log
from supervisor.files import UnsafeFileError, open_owned
from supervisor.gpu.aside import Aside, StillStuckError

LOOK_EVERY = 5.0
"""Seconds between looks at the sizes."""
LIMIT = 60.0
"""Seconds for one rotation: 50 MB take 0.1 to 1 s."""
STUCK = 5.0
"""Seconds more, after which its thread counts as stuck in the kernel and is left behind."""
RETRY = 60.0
"""Seconds of rest for a log whose rotation failed."""
ALIGN = 64 * 1024
"""Bytes. A multiple of every block size of ext4 and XFS: a cut must be whole blocks."""
CHUNK = 1024 * 1024
SPARE = 16 * 1024 * 1024
"""Bytes of the file system that a copy must leave free: the services need them more."""
_KEEP_SIZE, _PUNCH_HOLE, _COLLAPSE_RANGE = 0x01, 0x02, 0x08  # include/uapi/linux/falloc.h
_NOT_HERE = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, errno.ENOTTY)


class Cut(StrEnum):
    """How the head of a log was cut off."""

    COLLAPSE = "collapse"
    PUNCH = "punch"
    TRUNCATE = "truncate"


def rotate(path: Path, rules: Log, *, deadline: float, cuts: tuple[Cut, ...] = tuple(Cut)) -> Cut | None:
    """Finish what was interrupted, and rotate the log if it is due; None: it was not. Blocks: for a thread.

    Raises OSError (a full disk, UnsafeFileError: a link, or a stranger's file, in place of the log) and TimeoutError
    (`deadline`, boot-time seconds): then the log is as it was.
    """
    with contextlib.ExitStack() as stack:
        try:
            live = _opened(stack, open_owned(path, os.O_RDWR))
        except FileNotFoundError:
            return None
        if os.fstat(live).st_nlink != 1:
            raise UnsafeFileError(f"{path}: has another name too; a log that is rotated has one")
        _recover(path, live, rules.keep, deadline)
        start, size = _first_data(live), os.fstat(live).st_size
        end = (size - 1) // ALIGN * ALIGN  # not to the end: that cannot be collapsed
        if size - start <= rules.max_size or end <= start:
            return None
        copy = _opened(stack, _copy_head(path, live, start, end, deadline))
        os.rename(_copying(path), _pending(path))
        _sync_folder(path)
        os.fdatasync(live)  # else the cut does it, while the service waits for its write
        with at_rest(deadline):
            how = _cut(live, copy, start, end, deadline, cuts)
            _shift(path, rules.keep)
        return how


def copies(path: Path) -> list[Path]:
    """Those that there are, the latest first."""
    return list(_copies(path, 1))


def _opened(stack: contextlib.ExitStack, fd: int) -> int:
    stack.callback(os.close, fd)
    return fd


def _copies(path: Path, first: int) -> Iterator[Path]:
    number = first
    while os.path.lexists(name := _numbered(path, number)):
        yield name
        number += 1


def _numbered(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}")


def _copying(path: Path) -> Path:
    return path.with_name(f".{path.name}.copying")


def _pending(path: Path) -> Path:
    return path.with_name(f".{path.name}.pending")


# --- reading


@dataclass(frozen=True)
class Part:
    """A stretch of a log that lies in one file."""

    path: Path
    begin: int
    """In the file: behind its hole."""
    size: int
    mark: int
    """Of a copy: tells it from all others, under whatever name. Of the live file: its inode."""


_moving = threading.Lock()
"""Held while files of a log are cut and renamed, and by those who read them: all in one process."""


@contextlib.contextmanager
def at_rest(deadline: float) -> Iterator[None]:
    """No log is cut and no copy renamed meanwhile. Raises TimeoutError at `deadline`."""
    if not _moving.acquire(timeout=max(0.0, deadline - boot_time())):
        raise TimeoutError(errno.ETIMEDOUT, "logs are being cut or read, and this does not end")
    try:
        yield
    finally:
        _moving.release()


def parts(path: Path) -> tuple[list[Part], bool]:
    """A log's copies, the oldest first, and the live file; at rest each byte is in just one.

    True: before them there was more, which is gone or no file of ours. Raises OSError: the live file cannot be read.
    """
    live = open_owned(path)
    try:
        begin, found = _first_data(live), os.fstat(live)
        cut_off = _cut_off(path, live, begin)
    finally:
        os.close(live)
    older, lost = _older(path, gaps=1 if cut_off else 0)  # a shift that was killed leaves a gap
    if cut_off:
        older.insert(0, cut_off)
    size = max(0, found.st_size - begin)
    return [*reversed(older), Part(path, begin, size, found.st_ino)], lost or (begin > 0 and not older)


def _older(path: Path, gaps: int) -> tuple[list[Part], bool]:
    """The copies, the latest first; and are there more, behind a gap too many or a file that is not ours?"""
    found: list[Part] = []
    last = 0
    for number in sorted(_numbers(path)):
        gaps -= number - last - 1
        copy = _copy(_numbered(path, number))
        if gaps < 0 or copy is None:
            return found, True
        found.append(copy)
        last = number
    return found, False


def _numbers(path: Path) -> Iterator[int]:
    for name in os.listdir(path.parent):
        if name.startswith(f"{path.name}.") and re.fullmatch("[1-9][0-9]{0,5}", name[len(path.name) + 1 :]):
            yield int(name[len(path.name) + 1 :])


def _cut_off(path: Path, live: int, begin: int) -> Part | None:
    """`.pending`, if the log begins behind it: not as `_recover` finds out, but in bounded time."""
    pending = _copy(_pending(path))
    if pending is None or os.fstat(live).st_size - begin < pending.size:
        return pending
    fd = open_owned(pending.path)
    try:
        expected = os.pread(fd, CHUNK, 0)
    finally:
        os.close(fd)
    return None if os.pread(live, len(expected), begin) == expected else pending


def _copy(name: Path) -> Part | None:
    """None: it is not there, or it is no file of ours."""
    try:
        found = os.lstat(name)
    except OSError:
        return None
    if not stat.S_ISREG(found.st_mode) or found.st_uid not in (0, os.geteuid()):
        return None
    return Part(name, 0, found.st_size, zlib.crc32(b"%d %d" % (found.st_ino, found.st_mtime_ns)))


# --- the steps


def _recover(path: Path, live: int, keep: int, deadline: float) -> None:
    """What a rotation that was killed has left."""
    _copying(path).unlink(missing_ok=True)
    try:
        pending = open_owned(_pending(path))
    except FileNotFoundError:
        return
    try:
        begun = not _begins_with(live, _first_data(live), pending, deadline)
    finally:
        os.close(pending)
    if begun:
        with at_rest(deadline):
            _shift(path, keep)
    else:
        _pending(path).unlink()


def _begins_with(live: int, start: int, pending: int, deadline: float) -> bool:
    """Has the log still everything, from `start` on, that `pending` has?"""
    at = 0
    while True:
        _in_time(deadline)
        expected = os.pread(pending, CHUNK, at)
        if not expected:
            return True
        if os.pread(live, len(expected), start + at) != expected:
            return False
        at += len(expected)


def _first_data(live: int) -> int:
    """Where the log begins: behind the hole that was punched."""
    size = os.fstat(live).st_size  # before the look: what comes after it is no part of a hole
    try:
        found = os.lseek(live, 0, os.SEEK_DATA)
    except OSError as error:
        return size if error.errno == errno.ENXIO else 0
    return found // ALIGN * ALIGN


def _copy_head(path: Path, live: int, start: int, end: int, deadline: float) -> int:
    """The copy's fd, its content on disk, under its first name. On a failure there is none."""
    room = os.statvfs(path.parent)
    if room.f_bavail * room.f_frsize < end - start + SPARE:
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: no room for a copy of {end - start} bytes")
    name, found = _copying(path), os.fstat(live)
    copy = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        _append(live, copy, start, end, deadline)
        if os.geteuid() == 0:
            os.fchown(copy, found.st_uid, found.st_gid)
        os.fchmod(copy, found.st_mode & 0o666)
        os.fsync(copy)
    except BaseException:
        os.close(copy)
        name.unlink(missing_ok=True)
        raise
    return copy


def _append(live: int, copy: int, start: int, end: int, deadline: float) -> None:
    while start < end:
        _in_time(deadline)
        data = os.pread(live, min(CHUNK, end - start), start)
        if not data:
            raise OSError(errno.EIO, "the log has become shorter while it was copied")
        start += len(data)
        while data:
            data = data[os.write(copy, data) :]


def _cut(live: int, copy: int, start: int, end: int, deadline: float, cuts: tuple[Cut, ...]) -> Cut:
    """By the first way that this file system knows."""
    if Cut.COLLAPSE in cuts and _fallocate(live, _COLLAPSE_RANGE, 0, end):
        return Cut.COLLAPSE
    if Cut.PUNCH in cuts and _fallocate(live, _PUNCH_HOLE | _KEEP_SIZE, start, end - start):
        return Cut.PUNCH
    while (size := os.fstat(live).st_size) > end:  # what came meanwhile, until there is no more
        _append(live, copy, end, size, deadline)
        end = size
    os.ftruncate(live, 0)
    os.fsync(copy)
    return Cut.TRUNCATE


def _fallocate(fd: int, mode: int, offset: int, length: int) -> bool:
    """False: not on this file system. Raises OSError."""
    while libc_fallocate(fd, mode, offset, length) != 0:
        code = ctypes.get_errno()
        if code in _NOT_HERE:
            return False
        if code != errno.EINTR:
            raise OSError(code, f"cannot cut off its head: {os.strerror(code)}")
    return True


libc_fallocate = ctypes.CDLL(None, use_errno=True).fallocate
"""fallocate(2); Python has posix_fallocate only, which cannot cut."""
libc_fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


def _shift(path: Path, keep: int) -> None:
    """`.pending` becomes the first copy; the others move on, up to the first gap. Right at any repetition."""
    for name in list(_copies(path, keep)):
        name.unlink()
    for name in reversed(copies(path)):
        number = int(name.suffix[1:])
        os.rename(name, _numbered(path, number + 1))
    os.rename(_pending(path), _numbered(path, 1))
    _sync_folder(path)


def _sync_folder(path: Path) -> None:
    fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _in_time(deadline: float) -> None:
    if boot_time() >= deadline:
        raise TimeoutError(errno.ETIMEDOUT, "not done by its deadline")


# --- all logs of a node


class Rotation:
    """Looks at every log of a node, and rotates one at a time, beside the event loop."""

    def __init__(
        self,
        logs: Mapping[str, tuple[Path, Log]],
        clock: Clock,
        tell: Callable[[str], None],
        cuts: tuple[Cut, ...] = tuple(Cut),
    ) -> None:
        """`logs` by service. `tell` gets a sentence for each new trouble; the services go on whatever happens."""
        self._logs, self._clock, self._tell, self._cuts = logs, clock, tell, cuts
        self._aside = Aside("log")
        self._trouble: dict[str, str] = {}
        self._not_before: dict[str, float] = {}

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self.look()
            await self._clock.sleep_until(self._clock.now() + LOOK_EVERY)

    async def look(self) -> None:
        """One round. Nothing happens while an earlier rotation is stuck in the kernel."""
        if self._aside.stuck:
            return
        try:
            due = await self._aside.read(self._due, deadline=self._clock.now() + STUCK)
        except StillStuckError as error:
            self._tell(f"the log folder does not answer: {error}")
            return
        for name in due:
            if self._clock.now() >= self._not_before.get(name, 0.0) and not self._aside.stuck:
                await self._rotate(name)

    def _due(self) -> list[str]:
        """By size only, or with something left of an interrupted rotation."""
        return [name for name, (path, rules) in self._logs.items() if _is_due(path, rules)]

    async def _rotate(self, name: str) -> None:
        path, rules = self._logs[name]
        deadline = self._clock.now() + LIMIT
        try:
            how = await self._aside.read(
                lambda: rotate(path, rules, deadline=deadline, cuts=self._cuts), deadline=deadline + STUCK
            )
        except Exception as error:  # noqa: BLE001 - the edge of this work: told, and the service goes on
            self._not_before[name] = self._clock.now() + RETRY
            self._once(name, f"{name}: its log is not rotated, and grows: {_reason(error)}")
            return
        if how is Cut.TRUNCATE:
            self._once(
                name, f"{name}: the file system of its log can only truncate: lines written at that moment are lost"
            )
        elif how is not None:
            self._trouble.pop(name, None)

    def _once(self, name: str, text: str) -> None:
        if self._trouble.get(name) != text:
            self._trouble[name] = text
            self._tell(text)


def _is_due(path: Path, rules: Log) -> bool:
    if os.path.lexists(_pending(path)) or os.path.lexists(_copying(path)):
        return True
    try:
        found = os.lstat(path)
    except OSError:
        return False
    return found.st_size > rules.max_size or os.path.islink(path)


def _reason(error: Exception) -> str:
    text = str(error) if isinstance(error, UnsafeFileError) else getattr(error, "strerror", None) or repr(error)
    return "a symbolic link stands in its place" if getattr(error, "errno", None) == errno.ELOOP else text
