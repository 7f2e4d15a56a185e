"""Users and groups of this machine, as the configuration names them."""

import grp
import os
import pwd
from dataclasses import dataclass


@dataclass(frozen=True)
class Account:
    """What a service runs as."""

    name: str
    uid: int
    gid: int
    groups: tuple[int, ...]
    """All of them, `gid` included."""
    home: str


def account(user: str | int) -> Account:
    """The account of a name or uid. `KeyError` where this machine does not know it.

    The uid that gpuward itself runs as is always known, also in a container that has no entry for it.
    """
    try:
        entry = pwd.getpwuid(user) if isinstance(user, int) else pwd.getpwnam(user)
    except KeyError:
        if user != os.geteuid():
            raise
        return Account(str(user), os.geteuid(), os.getegid(), tuple(sorted({os.getegid(), *os.getgroups()})), "/")
    groups = os.getgrouplist(entry.pw_name, entry.pw_gid)
    return Account(entry.pw_name, entry.pw_uid, entry.pw_gid, tuple(sorted(set(groups))), entry.pw_dir)


def group_id(group: str | int) -> int:
    """The gid of a name or gid. `KeyError` where this machine does not know the name; any number is taken as it is."""
    return group if isinstance(group, int) else grp.getgrnam(group).gr_gid
