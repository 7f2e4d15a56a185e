"""The unix socket of the HTTP endpoints, and who asks through it.

Whoever reaches the socket has passed its mode already. Who it is is looked at once more, by what the kernel noted when
the peer connected (SO_PEERCRED and SO_PEERGROUPS of unix(7) and socket(7)): a pid could have been reused since, and a
look-up of the account would neither see newgrp(1) nor be sure to answer.
"""

import contextlib
import os
import socket
import stat
import struct
from asyncio.trsock import TransportSocket
from dataclasses import dataclass
from pathlib import Path

from supervisor.files import UnsafeFileError

API_SOCKET = "api.sock"
"""In `paths.run`."""
SO_PEERGROUPS = 59
"""asm-generic/socket.h; Linux 4.13. Python has no name for it."""
MOST_GROUPS = 256
"""As many as socket.getsockopt has room for."""
CREDENTIALS = struct.Struct("3i")
"""struct ucred: pid, uid, gid."""


@dataclass(frozen=True)
class Peer:
    """A process at the other end, as it was when it connected."""

    uid: int
    gids: frozenset[int]
    """Its effective and supplementary groups."""

    def may_command(self, admin_gid: int | None) -> bool:
        """Root, our own user, or a member of the group that the configuration names."""
        return self.uid in {0, os.geteuid()} or (admin_gid is not None and admin_gid in self.gids)


def listen_at(path: Path, gid: int | None) -> socket.socket:
    """A socket to be listened on: 0660 for `gid`, or 0600. Needs the run folder's flock.

    What a dead supervisor left is replaced; anything but a socket in its place raises UnsafeFileError. It gets its name
    only when mode and group are right.
    """
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise UnsafeFileError(f"{path} is not a socket: look at what it is, and remove it")
    temporary = path.with_name(f".{path.name}.new")
    temporary.unlink(missing_ok=True)
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        made.bind(bytes(temporary))
        os.chmod(temporary, 0o600)
        if gid is not None:
            os.chown(temporary, -1, gid, follow_symlinks=False)
            os.chmod(temporary, 0o660)
        os.rename(temporary, path)
    except BaseException:
        made.close()
        temporary.unlink(missing_ok=True)
        raise
    made.setblocking(False)
    return made


def peer_of(connection: TransportSocket | None) -> Peer | None:
    """Who is at the other end of a unix socket; None where it is another kind, or gone."""
    if connection is None or connection.family != socket.AF_UNIX:
        return None
    _, uid, gid = CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))
    try:
        groups = connection.getsockopt(socket.SOL_SOCKET, SO_PEERGROUPS, MOST_GROUPS * 4)
    except OSError:  # more groups than there is room for: it counts as a member of none of them
        groups = b""
    return Peer(uid, frozenset({gid, *(number for (number,) in struct.iter_unpack("I", groups))}))
