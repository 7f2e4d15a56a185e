"""Files that are whole or absent, and files that are really ours. Standard library only."""

import json
import os
import stat
from typing import Any


class UnsafeFileError(OSError):
    """A file or folder that somebody else could have placed or could change."""


def write_atomically(path: str | os.PathLike[str], data: bytes, mode: int = 0o600, *, durable: bool = True) -> None:
    """Replace `path` by `data`: a reader sees the old or the new content, also after a power cut.

    Temporary name in the same folder, fsync, rename, fsync of the folder (rename(2), fsync(2)). Raises OSError;
    then the old file is as it was. Not `durable`: without fsync, for what means nothing after a power cut.
    """
    target = os.fspath(path)
    folder = os.path.dirname(target) or "."
    temporary = f"{folder}/.{os.path.basename(target)}.{os.getpid()}.tmp"
    try:
        _write_new(temporary, data, mode, durable)
        os.rename(temporary, target)
    except BaseException:
        _unlink_if_there(temporary)
        raise
    if durable:
        _sync_folder(folder)


def rename_new(path: str | os.PathLike[str], name: str | os.PathLike[str]) -> None:
    """Give a file another name in its folder, durably. Raises OSError, FileExistsError where the name is taken."""
    os.link(path, name, follow_symlinks=False)
    os.unlink(path)
    _sync_folder(os.path.dirname(os.fspath(path)) or ".")


def _sync_folder(folder: str) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def open_owned(path: str | os.PathLike[str], flags: int = os.O_RDONLY) -> int:
    """Open a regular file that belongs to us or to root and is no symbolic link.

    Raises UnsafeFileError when it is anything else, OSError as open(2) does (ELOOP for a link).
    """
    fd = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or found.st_uid not in (0, os.geteuid()):
        os.close(fd)
        raise UnsafeFileError(f"{os.fspath(path)}: not a regular file of ours (owner {found.st_uid})")
    os.set_blocking(fd, True)
    return fd


def check_folder(folder: str) -> None:
    """Raise UnsafeFileError when group or others could put files into this folder, or a stranger owns it."""
    found = os.stat(folder)
    if found.st_uid not in (0, os.geteuid()):
        raise UnsafeFileError(f"{folder}: belongs to uid {found.st_uid}, expected root or uid {os.geteuid()}")
    if found.st_mode & 0o022:
        raise UnsafeFileError(
            f"{folder}: mode {stat.S_IMODE(found.st_mode):04o} lets group or others write; expected 0755 or tighter"
        )


def read_at_most(path: str | os.PathLike[str], limit: int) -> bytes:
    """The first `limit` bytes of a file that is ours (see `open_owned`)."""
    fd = open_owned(path)
    try:
        return os.read(fd, limit)
    finally:
        os.close(fd)


def parse_json(raw: bytes) -> Any:
    """What JSON from a file says. Raises ValueError, also where it is nested too deeply for the parser."""
    try:
        return json.loads(raw)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _write_new(path: str, data: bytes, mode: int, durable: bool) -> None:
    _unlink_if_there(path)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    try:
        os.fchmod(fd, mode)
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        if durable:
            os.fsync(fd)
    finally:
        os.close(fd)


def _unlink_if_there(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        return
