"""`<run>/keeper.json`: what a keeper leaves for the next one, should it be killed.

    {"version": 2, "over": token, "boot_id", "term": {"token", "deadline_ns"} | null,
     "services": {name: {"pid", "start_ticks", "since_ns", "ready", "units": {unit: {"pid", "start_ticks", "ready"}}}},
     "locks": {gpu: {"path", "device", "inode", "holder": {…} | null, "box": cgroup | null, "taken_ns"}}}

`over` counts for ever; the rest for this boot, in which no power cut can have damaged it: the file is whole (renamed
into place) but not fsynced, since the keeper waits for no disk. Times are boot-time nanoseconds. Version 1 had `over`
alone. What runs, cgroupfs says; this file only says which process of a service is its first one, and whose the locks
were.
"""

import json
import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from supervisor import files, proc
from supervisor.keeper.loop import guard, log

LARGEST = 1024 * 1024
"""Bytes read: 200 services take 30 KB."""


class LeftLock(NamedTuple):
    """A lock file, and who had it."""

    path: str
    inode: tuple[int, int]
    holder: dict[str, Any] | None
    box: str | None
    taken_ns: int


class LeftProcess(NamedTuple):
    """A process, for as long as this boot lasts."""

    pid: int
    start_ticks: int
    ready: bool = False


class LeftService(NamedTuple):
    """The first process of a service, and its sidecars."""

    process: LeftProcess
    since_ns: int
    units: Mapping[str, LeftProcess] = MappingProxyType({})


class Left(NamedTuple):
    """All of it. `token` 0: no term was armed in this boot."""

    over: int = 0
    token: int = 0
    deadline_ns: int = 0
    services: Mapping[str, LeftService] = MappingProxyType({})
    locks: Mapping[int, LeftLock] = MappingProxyType({})


def read(path: str) -> Left:
    """What an earlier keeper wrote. A corrupt file is set aside, and counts as none."""
    try:
        return _parse(files.parse_json(files.read_at_most(path, LARGEST)), proc.boot_id())
    except FileNotFoundError:
        return Left()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        log(f"{path}: {error!r}; set aside")
        guard(os.rename, path, path + ".corrupt")
        return Left()


def write(path: str, left: Left) -> None:
    """Replace the file. Raises OSError."""
    term = {"token": left.token, "deadline_ns": left.deadline_ns} if left.token else None
    data = {
        "version": 2,
        "over": left.over,
        "boot_id": proc.boot_id(),
        "term": term,
        "services": {
            name: {
                **row.process._asdict(),
                "since_ns": row.since_ns,
                "units": {unit: found._asdict() for unit, found in row.units.items()},
            }
            for name, row in left.services.items()
        },
        "locks": {
            str(gpu): {
                "path": row.path,
                "device": row.inode[0],
                "inode": row.inode[1],
                "holder": row.holder,
                "box": row.box,
                "taken_ns": row.taken_ns,
            }
            for gpu, row in left.locks.items()
        },
    }
    files.write_atomically(path, json.dumps(data).encode() + b"\n", durable=False)


def _parse(data: Any, boot_id: str) -> Left:
    over = _int(data["over"])
    if data.get("boot_id") != boot_id or data.get("term") is None:
        return Left(over)
    services = {
        str(name): LeftService(
            _process(row),
            _int(row["since_ns"]),
            {str(unit): _process(found) for unit, found in row.get("units", {}).items()},
        )
        for name, row in data["services"].items()
    }
    return Left(
        over,
        _int(data["term"]["token"]),
        _int(data["term"]["deadline_ns"]),
        services,
        {int(gpu): _lock(row) for gpu, row in data["locks"].items()},
    )


def _process(row: Any) -> LeftProcess:
    return LeftProcess(_int(row["pid"]), _int(row["start_ticks"]), row.get("ready") is True)


def _lock(row: Any) -> LeftLock:
    holder, box = row["holder"], row["box"]
    if not (holder is None or isinstance(holder, dict)) or not (box is None or isinstance(box, str)):
        raise ValueError(f"locks: {row!r}")
    return LeftLock(str(row["path"]), (_int(row["device"]), _int(row["inode"])), holder, box, _int(row["taken_ns"]))


def _int(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"expected a whole number, found {value!r}")
    return value
