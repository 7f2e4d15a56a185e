"""GPUs that are not there, for demo, tests and laptops: device files that processes really open, faults on request.

One folder holds, per GPU, its state `gpu-N.json` and its device `nvidiaN`, and `persistenced.json` for the daemon.
Anybody may set a fault by `set_state` or by editing the file; a key or value that this file does not know is an error
that names file and key, since a misspelt fault must not look like a healthy GPU.
"""

import asyncio
import dataclasses
import fcntl
import json
import os
import stat
import uuid as uuids
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from supervisor.gpu.aside import Aside, StillStuckError
from supervisor.gpu.driver import DriverError, GpuFacts, GpuVerdict, ResetRefusedError
from supervisor.gpu.holders import DeviceId, any_holder, holders

STAND_IN = (1, 5)
"""Device number of the node that stands in for a GPU: /dev/zero's, which opens, reads and maps everywhere."""


class SimulatedStateError(DriverError):
    """A state file that cannot be read as one: which file, which key, what was found, what was expected."""

    def __init__(self, file: Path, key: str, found: object, expected: str) -> None:
        where = f"{file}: {key}" if key else f"{file}"
        super().__init__(GpuVerdict.UNKNOWN, f"{where}: found {found!r}, expected {expected}")


@dataclass(frozen=True)
class SimulatedGpuState:
    """All that can be set of one GPU. Seconds."""

    uuid: str = ""
    minor: int = 0
    verdict: str = GpuVerdict.HEALTHY.value
    persistence: bool = False
    answer_s: float = 0.0
    """How long the driver takes to answer about it: longer than the asker's deadline is `unresponsive`."""
    reset_s: float = 0.05
    reset_cures: bool = True
    reset_refused: str = ""
    """The platform's permanent refusal, if it has one."""
    ghost_pids: tuple[int, ...] = ()
    """PIDs that the driver lists without a process behind them."""
    resets: int = 0


@dataclass(frozen=True)
class Persistenced:
    """The persistence daemon."""

    running: bool = False
    startable: bool = True
    start_s: float = 0.0


T = TypeVar("T")
Kind = TypeVar("Kind", SimulatedGpuState, Persistenced)


class SimulatedDriver:
    """`GpuDriver` over such a folder, which is made where it is missing."""

    def __init__(self, folder: Path, count: int = 1) -> None:
        """Raises OSError where folder or device files cannot be made, SimulatedStateError for a wrong state."""
        if count < 1:
            raise ValueError(f"a simulated driver needs at least one GPU, not {count}")
        self._folder = folder
        self._count = count
        self._lane = Aside("simulated-gpu")
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        for index in range(count):
            _make_device(device_file(folder, index))
            with _locked(folder):
                state = read_state(folder, index)
                if not state.uuid:
                    named = uuids.uuid5(uuids.NAMESPACE_URL, f"{folder}#{index}")
                    _write(_state_file(folder, index), dataclasses.replace(state, uuid=f"GPU-{named}", minor=index))

    async def facts(self, *, deadline: float) -> tuple[GpuFacts, ...]:
        """See GpuDriver. The PIDs are those that hold the device file, and the ghosts."""
        return tuple(await asyncio.gather(*(self._facts(index, deadline) for index in range(self._count))))

    async def reset(self, uuid: str, *, deadline: float) -> None:
        """See GpuDriver."""
        index, state = await self._read(lambda: self._by_uuid(uuid), deadline)
        on_it = await self._read(lambda: any_holder(holders(self._device(index))), deadline)
        if on_it:
            raise ResetRefusedError(
                GpuVerdict(state.verdict), f"{uuid} was not reset: in use by PIDs {sorted(on_it)}", holders=on_it
            )
        if state.reset_refused:
            raise ResetRefusedError(
                GpuVerdict(state.verdict), f"{uuid} was not reset: {state.reset_refused}", permanent=True
            )
        await self._within(state.reset_s, deadline, f"the reset of {uuid}")
        changes: dict[str, object] = {"resets": state.resets + 1}
        if state.reset_cures and GpuVerdict(state.verdict).wants_reset:
            changes |= {"verdict": GpuVerdict.HEALTHY.value}
        if state.reset_cures:
            changes |= {"ghost_pids": ()}
        after = await self._read(lambda: set_state(self._folder, index, **changes), deadline)
        if after.verdict != GpuVerdict.HEALTHY.value:
            raise DriverError(GpuVerdict(after.verdict), f"{uuid} is {after.verdict} after its reset")

    async def ensure_persistence(self, *, deadline: float) -> None:
        """See GpuDriver."""
        daemon = await self._read(lambda: read_persistenced(self._folder), deadline)
        if not daemon.running:
            if not daemon.startable:
                raise DriverError(GpuVerdict.HEALTHY, "nvidia-persistenced cannot be started here (startable: false)")
            await self._within(daemon.start_s, deadline, "the start of nvidia-persistenced")
            await self._read(lambda: set_persistenced(self._folder, running=True), deadline)
        await self._read(self._persistence_on, deadline)

    def _persistence_on(self) -> None:
        for index in range(self._count):
            if not read_state(self._folder, index).persistence:
                set_state(self._folder, index, persistence=True)

    async def _facts(self, index: int, deadline: float) -> GpuFacts:
        state = await self._read(lambda: read_state(self._folder, index), deadline)
        verdict, why = GpuVerdict(state.verdict), f"simulated: {_state_file(self._folder, index)}"
        pids: frozenset[int] | None
        try:
            await self._within(state.answer_s, deadline, f"GPU {index}")
            found = await self._read(lambda: any_holder(holders(self._device(index))), deadline)
            pids = found | frozenset(state.ghost_pids)
        except DriverError as error:
            verdict, pids, why = error.verdict, None, str(error)
        if verdict in {GpuVerdict.NO_DRIVER, GpuVerdict.LOST, GpuVerdict.UNRESPONSIVE}:
            pids = None
        return GpuFacts(
            uuid=state.uuid,
            index=index,
            minor=state.minor,
            device=device_file(self._folder, index),
            verdict=verdict,
            pids=pids,
            persistence=None if pids is None else state.persistence,
            why=why,
        )

    def _device(self, index: int) -> DeviceId:
        return DeviceId.of(device_file(self._folder, index))

    def _by_uuid(self, uuid: str) -> tuple[int, SimulatedGpuState]:
        for index in range(self._count):
            state = read_state(self._folder, index)
            if state.uuid == uuid:
                return index, state
        raise DriverError(GpuVerdict.UNKNOWN, f"no GPU {uuid} in {self._folder}")

    async def _read(self, work: Callable[[], T], deadline: float) -> T:
        try:
            return await self._lane.read(work, deadline=deadline)
        except StillStuckError as error:
            raise DriverError(GpuVerdict.UNRESPONSIVE, f"simulated driver in {self._folder}: {error}") from None
        except OSError as error:  # say, no free file descriptor: that tells nothing of the GPU
            raise DriverError(GpuVerdict.UNKNOWN, f"simulated driver in {self._folder}: {error}") from error

    async def _within(self, seconds: float, deadline: float, what: str) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout_at(deadline):
                await asyncio.sleep(seconds)
        except TimeoutError:
            late = f"{what}: no answer by the deadline, {seconds} s at {loop.time():.1f}"
            raise DriverError(GpuVerdict.UNRESPONSIVE, late) from None


def device_file(folder: Path, index: int) -> Path:
    """The device that services open."""
    return folder / f"nvidia{index}"


def read_state(folder: Path, index: int) -> SimulatedGpuState:
    """One GPU's state; a missing file is a healthy GPU. Raises SimulatedStateError."""
    return _parse(SimulatedGpuState, _state_file(folder, index))


def set_state(folder: Path, index: int, **changes: object) -> SimulatedGpuState:
    """Change one GPU (a fault, or its end) and return what it is now. Raises SimulatedStateError for a wrong one."""
    return _change(SimulatedGpuState, _state_file(folder, index), changes)


def read_persistenced(folder: Path) -> Persistenced:
    return _parse(Persistenced, folder / "persistenced.json")


def set_persistenced(folder: Path, **changes: object) -> Persistenced:
    """Change the persistence daemon. Raises SimulatedStateError."""
    return _change(Persistenced, folder / "persistenced.json", changes)


def _state_file(folder: Path, index: int) -> Path:
    return folder / f"gpu-{index}.json"


def _change(kind: type[Kind], file: Path, changes: dict[str, object]) -> Kind:
    with _locked(file.parent):
        raw = dataclasses.asdict(_parse(kind, file)) | changes
        state = _checked(kind, file, json.loads(json.dumps(raw)))
        _write(file, state)
    return state


def _parse(kind: type[Kind], file: Path) -> Kind:
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        return kind()
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SimulatedStateError(file, "", text[:40], f"JSON ({error})") from None
    if not isinstance(raw, dict):
        raise SimulatedStateError(file, "", raw, "a JSON object")
    return _checked(kind, file, raw)


def _checked(kind: type[Kind], file: Path, raw: dict[str, Any]) -> Kind:
    defaults = {field.name: field.default for field in dataclasses.fields(kind)}
    values: dict[str, Any] = {}
    for key, value in raw.items():
        if key not in defaults:
            raise SimulatedStateError(file, key, value, f"one of {', '.join(sorted(defaults))}")
        values[key] = _value(file, key, value, defaults[key])
    return kind(**values)


def _value(file: Path, key: str, value: Any, default: object) -> object:
    if key == "verdict":
        allowed = [verdict.value for verdict in GpuVerdict]
        if value not in allowed:
            raise SimulatedStateError(file, key, value, f"one of {', '.join(allowed)}")
    elif isinstance(default, tuple):
        if not isinstance(value, list) or not all(type(pid) is int and pid > 0 for pid in value):
            raise SimulatedStateError(file, key, value, "a list of PIDs")
        return tuple(value)
    elif isinstance(default, float):
        if type(value) not in (int, float) or not 0 <= value < float("inf"):
            raise SimulatedStateError(file, key, value, "seconds, 0 or more")
        return float(value)
    elif type(value) is not type(default) or (type(value) is int and value < 0):
        raise SimulatedStateError(
            file, key, value, {bool: "true or false", int: "0 or more"}.get(type(default), "text")
        )
    return value


def _write(file: Path, state: SimulatedGpuState | Persistenced) -> None:
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    temporary.write_text(json.dumps(dataclasses.asdict(state), indent=1) + "\n", encoding="utf-8")
    temporary.replace(file)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One writer at a time: a fault set from outside and a reset's end must not undo each other."""
    fd = os.open(folder / ".writers", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _make_device(file: Path) -> None:
    """A node where this user and this file system allow one that opens, else a regular file."""
    if file.exists():
        return
    with suppress(OSError):
        os.mknod(file, 0o666 | stat.S_IFCHR, os.makedev(*STAND_IN))
        os.chmod(file, 0o666)
        try:
            os.close(os.open(file, os.O_RDWR | os.O_CLOEXEC))
        except OSError:  # a file system mounted nodev
            file.unlink()
        else:
            return
    file.touch(mode=0o666)
    file.chmod(0o666)
