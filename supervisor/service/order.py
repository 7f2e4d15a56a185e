"""What the keeper is asked to start: command, environment and numeric ids, made from a service's specification.

Made anew for each start, so a changed env_file counts from the next start on. It reads files and asks the machine for
accounts (which may ask a directory server): it blocks, so it runs in a thread.
"""

import os
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from supervisor.config import engines
from supervisor.config.accounts import Account, group_id
from supervisor.config.service import Service, Sidecar
from supervisor.gpu.driver import GpuFacts
from supervisor.keeper.protocol import LOOK, NOTIFY_FOLDER, NOTIFY_SOCKET, SIDECAR
from supervisor.service import container

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


def make_order(
    name: str, spec: Service, where: Surroundings, *, token: int, gpu: GpuFacts | None, parent: str | None
) -> dict[str, Any]:
    """The fields of a `start` request, `lock` aside. `parent`: the node's fenced parent, None in weak containment.

    Raises OrderError. Blocks: call it in a thread.
    """
    try:
        account = spec.account
    except KeyError:
        raise OrderError(f"user {spec.user!r} is not known to this machine") from None
    order = {"token": token, "service": name, "log": str(where.log / f"{name}.log"), "log_gid": _log_gid()}
    told = _told(name, spec, where, token, gpu)
    if spec.container is not None:
        if parent is None:
            raise OrderError("a container needs cgroup v2, and this node has only process groups")
        place = container.Place(name, where.node, where.run, parent, token, account, gpu)
        return order | _of_container(spec, place, told)
    return order | _as_user(spec.command, account, _configured(spec) | told, spec.cwd)


def make_sidecar_order(
    service: str, name: str, spec: Service, where: Surroundings, *, token: int, gpu: GpuFacts | None
) -> dict[str, Any]:
    """The same for a sidecar of the service. Raises OrderError. Blocks."""
    sidecar = spec.sidecars[name]
    try:
        account = sidecar.account or spec.account
    except KeyError:
        raise OrderError(f"user {sidecar.user or spec.user!r} is not known to this machine") from None
    env = _configured(sidecar) | _told(service, spec, where, token, gpu)
    env.pop("WATCHDOG_USEC", None)  # heartbeats are the service's
    return {
        "token": token,
        "service": service,
        "unit": SIDECAR + name,
        "log": str(sidecar_log(where.log, service, name)),
        "log_gid": _log_gid(),
        **_as_user(sidecar.command, account, env, sidecar.cwd),
    }


def make_look_order(
    service: str, look: str, words: Sequence[str], spec: Service, where: Surroundings, *, token: int
) -> dict[str, Any]:
    """The same for a command that looks at the service from inside; what it prints goes nowhere. Raises OrderError."""
    env = _configured(spec) | _told(service, spec, where, token, None)
    for name in ("WATCHDOG_USEC", "NOTIFY_SOCKET"):  # it does not speak for the service
        env.pop(name, None)
    unit = {"token": token, "service": service, "unit": LOOK + look, "log": None}
    try:
        return unit | _as_user(words, spec.account, env, spec.cwd)
    except KeyError:
        raise OrderError(f"user {spec.user!r} is not known to this machine") from None


def _log_gid() -> int | None:
    """Who may read logs on Debian and Ubuntu; None: this machine has no such group."""
    try:
        return group_id("adm")
    except KeyError:
        return None


def sidecar_log(folder: Path, service: str, name: str) -> Path:
    """Where a sidecar's output goes: no service's name has an @."""
    return folder / f"{service}@{name}.log"


def _as_user(command: Sequence[str], account: Account, env: dict[str, str], cwd: Path) -> dict[str, Any]:
    base = {"PATH": PATH, "HOME": account.home, "USER": account.name, "LOGNAME": account.name, "LANG": "C.UTF-8"}
    return {
        "argv": list(command),
        "env": base | env,
        "cwd": str(cwd),
        "uid": account.uid,
        "gid": account.gid,
        "groups": list(account.groups),
    }


def _of_container(spec: Service, place: container.Place, told: dict[str, str]) -> dict[str, Any]:
    """The client runs as the keeper does, the container as the service's user."""
    assert spec.container is not None
    client = engines.client(spec.container)
    if client is None:
        raise OrderError(engines.missing(spec.container))
    inside = told | {"NOTIFY_SOCKET": str(place.run / NOTIFY_FOLDER / NOTIFY_SOCKET)}
    try:
        container.write_env_file(container.env_file(place.run, place.name), _configured(spec) | inside)
    except container.ContainerError as error:
        raise OrderError(str(error)) from None
    except OSError as error:
        raise OrderError(f"its variables cannot be written: {error}") from None
    container.tidy_v1(place.parent, place.token)
    cwd = spec.cwd if "cwd" in spec.model_fields_set else None
    own = {name: value for name, value in told.items() if name.startswith("GPUWARD_")}
    return {
        "argv": [*client, *container.run_words(spec.container, place, cwd)],
        "env": engines.CLIENT_ENV | own,
        "cwd": "/",
        "uid": None,
        "gid": None,
        "groups": [],
    }


def _configured(spec: Service | Sidecar) -> dict[str, str]:
    return dict(spec.env) if spec.env_file is None else spec.env | read_env_file(spec.env_file)


def _told(name: str, spec: Service, where: Surroundings, token: int, gpu: GpuFacts | None) -> dict[str, str]:
    """What gpuward tells it; wins over what is configured."""
    env = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu.uuid}
    env |= {
        "GPUWARD_NODE": where.node,
        "GPUWARD_SERVICE": name,
        "GPUWARD_FENCING_TOKEN": str(token),
        "GPUWARD_RUN_DIR": str(where.run),
        "NOTIFY_SOCKET": str(where.run / NOTIFY_SOCKET),
    }
    if spec.heartbeat is not None:
        env["WATCHDOG_USEC"] = str(round(spec.heartbeat * 1e6))
    return env


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
