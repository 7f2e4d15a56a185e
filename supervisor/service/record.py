"""`<run>/services/NAME.json`: what a restarted supervisor must know of a service besides what the keeper knows.

    {"version": 1, "boot_id", "token", "spec", "state", "why", "held", "restarts", "executable",
     "account": {"last_failure", "backoffs", "failures", "degraded"}, "pid", "start_ticks", "cgroup", "next_at"}

Written with each change of state: first the intent (`starting`, pid null), then the whole of it. `spec` is a hash of
the configuration it was started by. No arguments, no environment: they can hold secrets. 0600, and of this boot only.
"""

import asyncio
import hashlib
import json
import math
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from supervisor.config.service import Service
from supervisor.files import parse_json, read_at_most, write_atomically
from supervisor.service.restart import Account

LARGEST = 64 * 1024
"""Bytes read of such a file; ours stay under 2 KiB."""
FOLDER = "services"


@dataclass(frozen=True)
class Record:
    """One service, as its runner knows it."""

    token: int
    spec: str
    state: str
    why: str
    held: bool
    restarts: int
    executable: str
    account: Account
    pid: int | None = None
    start_ticks: int | None = None
    cgroup: str | None = None
    next_at: float | None = None
    """When its pause is over (boot-time seconds)."""


def spec_hash(spec: Service) -> str:
    """Of everything that is configured for a service."""
    return hashlib.sha256(spec.model_dump_json().encode()).hexdigest()[:16]


class Records:
    """The files of all services of a node. `report` is told of what cannot be read or written."""

    def __init__(self, run: Path, boot_id: str, report: Callable[[str], None]) -> None:
        self._folder, self._boot_id, self._report = run / FOLDER, boot_id, report
        self._waiting: dict[str, Record] = {}
        self._stirred = asyncio.Event()
        self._said = ""

    def load(self, name: str) -> Record | None:
        """None: there is none of this boot. One that is damaged is set aside, and reported. Blocks."""
        path = self._path(name)
        try:
            found = parse_json(read_at_most(path, LARGEST))
            if not isinstance(found["boot_id"], str):
                raise TypeError(f"boot_id: {found['boot_id']!r}")
            if found["boot_id"] != self._boot_id:
                return None
            account = Account(**found.pop("account"))
            known = {field.name for field in fields(Record)}
            return _checked(Record(account=account, **{key: found[key] for key in known & set(found)}))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            self._report(f"{path}: cannot be read ({type(error).__name__}: {error}); {_set_aside(path)}")
            return None

    def put(self, name: str, record: Record) -> None:
        """To be written soon; only the latest counts."""
        self._waiting[name] = record
        self._stirred.set()

    async def run(self) -> None:
        """Until cancelled; what still waits is written then."""
        try:
            while True:
                await self._stirred.wait()
                self._stirred.clear()
                await asyncio.to_thread(self._write_waiting)
        finally:
            self._write_waiting()

    def _write_waiting(self) -> None:
        while self._waiting:
            name, record = self._waiting.popitem()
            try:
                self._folder.mkdir(mode=0o700, exist_ok=True)
                data = {"version": 1, "boot_id": self._boot_id, **asdict(record)}
                write_atomically(self._path(name), json.dumps(data).encode())
            except OSError as error:
                if str(error) != self._said:
                    self._report(f"the record of {name} was not written: {error}")
                self._said = str(error)

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.json"


def _checked(record: Record) -> Record:
    """Raises TypeError or ValueError where a field is not what it should be."""
    account = record.account
    counts = (record.restarts, account.backoffs, account.failures)
    flags = (record.held, account.degraded)
    times = (account.last_failure, record.next_at)
    if not all(type(flag) is bool for flag in flags) or not all(type(count) is int and count >= 0 for count in counts):
        raise TypeError(f"held, degraded: {flags!r}; restarts, backoffs, failures: {counts!r}")
    if not all(time is None or (type(time) in (int, float) and math.isfinite(time)) for time in times):
        raise TypeError(f"last_failure, next_at: {times!r}")
    return record


def _set_aside(path: Path) -> str:
    aside = path.with_name(f"{path.name}.damaged-{os.urandom(4).hex()}")
    try:
        path.rename(aside)
    except OSError as error:
        return f"could not be set aside: {error}"
    return f"set aside as {aside.name}"
