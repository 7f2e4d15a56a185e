"""What the keeper is asked to start: command, environment and numeric ids, made from a service's specification.

Made anew for each start, so a changed env_file counts from the next start on. It reads files and asks the machine for
accounts (which may ask a directory server): it blocks, so it runs in a thread.
"""

import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from supervisor.config.schema import Service
from supervisor.keeper.protocol import NOTIFY_SOCKET

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""What a service gets as PATH unless it sets its own: Debian's for root, without anything of this process."""
MAX_ENV_FILE = 64 * 1024
"""Bytes. The whole request has to fit a packet to the keeper."""


class OrderError(Exception):
    """This service cannot be started as it is configured; the text says why, without any value of its environment."""


@dataclass(frozen=True)
class Surroundings:
    """What a service is told of where it runs."""

    node: str
    run: Path
    log: Path


def make_order(name: str, spec: Service, where: Surroundings, *, token: int, uuid: str | None) -> dict[str, Any]:
    """The fields of a `start` request, `lock` aside. Raises OrderError. Blocks: call it in a thread."""
    try:
        account = spec.account
    except KeyError:
        raise OrderError(f"user {spec.user!r} is not known to this machine") from None
    env = {"PATH": PATH, "HOME": account.home, "USER": account.name, "LOGNAME": account.name, "LANG": "C.UTF-8"}
    env |= spec.env
    if spec.env_file is not None:
        env |= read_env_file(spec.env_file)
    if uuid is not None:
        env["CUDA_VISIBLE_DEVICES"] = uuid
    env |= {
        "GPUWARD_NODE": where.node,
        "GPUWARD_SERVICE": name,
        "GPUWARD_FENCING_TOKEN": str(token),
        "GPUWARD_RUN_DIR": str(where.run),
        "NOTIFY_SOCKET": str(where.run / NOTIFY_SOCKET),
    }
    if spec.heartbeat is not None:
        env["WATCHDOG_USEC"] = str(round(spec.heartbeat * 1e6))
    return {
        "token": token,
        "service": name,
        "argv": list(spec.command),
        "env": env,
        "cwd": str(spec.cwd),
        "uid": account.uid,
        "gid": account.gid,
        "groups": list(account.groups),
        "log": str(where.log / f"{name}.log"),
    }


def read_env_file(file: Path) -> dict[str, str]:
    """NAME=value a line; empty lines and those with # are skipped; a value may stand in matching quotes.

    Raises OrderError with file and line, never with the value: it may be a secret.
    """
    try:
        with open(os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as source:
            if not stat.S_ISREG(os.fstat(source.fileno()).st_mode):
                raise OrderError(f"env_file {file}: not a regular file")
            raw = source.read(MAX_ENV_FILE + 1)
        text = raw.decode("utf-8")
    except OSError as error:
        raise OrderError(f"env_file {file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise OrderError(f"env_file {file}: not UTF-8") from None
    if len(raw) > MAX_ENV_FILE:
        raise OrderError(f"env_file {file}: longer than {MAX_ENV_FILE} bytes")
    values = {}
    for number, line in enumerate(text.split("\n"), 1):
        stripped = line.strip()
        if not stripped or stripped.startswith("#"):
            continue
        name, equals, value = stripped.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) or "\0" in value:
            raise OrderError(f"env_file {file}, line {number}: not of the form NAME=value")
        quoted = len(value) >= 2 and value[0] == value[-1] and value[0] in "'\""
        values[name] = value[1:-1] if quoted else value
    return values
