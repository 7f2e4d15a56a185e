"""Which process holds a GPU device: by what the kernel says of its open files and mappings.

`psutil.Process.open_files()` leaves devices out, and a name may be spelled in many ways, so identity is the device
number behind each entry of /proc/PID/fd (proc_pid_fd(5)), and a mapping counts as well (a CUDA process may close the
fd and keep the mapping). What cannot be read is UNKNOWN, never NOT_HELD.

These reads can block (see `aside`): call them in a thread.
"""

import enum
import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PROC = "/proc"
MEMORY_DEVICES = 1


class Hold(enum.StrEnum):
    HELD = "held"
    NOT_HELD = "not held"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class DeviceId:
    """What makes an open file this device: the device number of a node, else the inode of a simulated one.

    A simulated device is a regular file or a node that bears the number of /dev/zero (major 1, the memory devices of
    the kernel's devices.txt): that number names no GPU, and a hundred processes have /dev/zero open.
    """

    name: str
    """Base name, by which mappings are pre-selected."""
    rdev: int | None
    dev: int
    ino: int

    @classmethod
    def of(cls, path: Path) -> "DeviceId":
        """Raises OSError where there is no such device."""
        return cls.from_stat(path.name, os.stat(path))

    @classmethod
    def from_stat(cls, name: str, found: os.stat_result) -> "DeviceId":
        by_number = stat.S_ISCHR(found.st_mode) and os.major(found.st_rdev) != MEMORY_DEVICES
        rdev = found.st_rdev if by_number else None
        return cls(name=name, rdev=rdev, dev=found.st_dev, ino=found.st_ino)

    def is_it(self, found: os.stat_result) -> bool:
        if self.rdev is not None:
            return stat.S_ISCHR(found.st_mode) and found.st_rdev == self.rdev
        return (found.st_dev, found.st_ino) == (self.dev, self.ino)


def all_pids() -> list[int]:
    return [int(name) for name in os.listdir(PROC) if name.isdigit()]


def holders(device: DeviceId, pids: Iterable[int] | None = None) -> dict[int, Hold]:
    """Those of `pids` (default: all of this PID namespace) that hold `device` or could not be looked at."""
    looked = {pid: holds(pid, [device])[0] for pid in (all_pids() if pids is None else pids)}
    return {pid: hold for pid, hold in looked.items() if hold is not Hold.NOT_HELD}


def holds(pid: int, devices: Sequence[DeviceId]) -> list[Hold]:
    """For each of `devices`, whether process `pid` holds it. A process that has gone holds nothing."""
    held: set[int] = set()
    unknown = False
    for sources in (_open_files(pid), _mappings(pid, {device.name for device in devices})):
        try:
            for found in sources:
                held.update(index for index, device in enumerate(devices) if device.is_it(found))
        except (FileNotFoundError, ProcessLookupError):
            continue
        except OSError:
            unknown = True
    other = Hold.UNKNOWN if unknown else Hold.NOT_HELD
    return [Hold.HELD if index in held else other for index in range(len(devices))]


def any_holder(found: Mapping[int, Hold]) -> frozenset[int]:
    """The PIDs that are known to hold."""
    return frozenset(pid for pid, hold in found.items() if hold is Hold.HELD)


def _open_files(pid: int) -> Iterator[os.stat_result]:
    folder = f"{PROC}/{pid}/fd"
    yielded = False
    for found in _stats(folder):
        yielded = True
        yield found
    if yielded:
        return
    # No open file at all: perhaps a zombie whose first thread has ended while others live on with the table.
    for thread in os.listdir(f"{PROC}/{pid}/task"):
        try:
            yield from _stats(f"{PROC}/{pid}/task/{thread}/fd")
        except (FileNotFoundError, ProcessLookupError):
            continue


def _stats(folder: str) -> Iterator[os.stat_result]:
    for name in os.listdir(folder):
        path = f"{folder}/{name}"
        try:
            if not os.readlink(path).startswith("/"):
                continue  # sockets, pipes and such: no device, and no need for a stat
            found = os.stat(path)
        except (FileNotFoundError, ProcessLookupError):
            continue
        yield found


def _mappings(pid: int, names: set[str]) -> Iterator[os.stat_result]:
    """Of mapped files that bear one of `names`: maps shows where a node lies, only map_files its device number."""
    with open(f"{PROC}/{pid}/maps", "rb") as maps:
        for line in maps:
            fields = line.split(None, 5)
            if len(fields) < 6 or not fields[5].startswith(b"/"):
                continue
            path = os.fsdecode(fields[5].rstrip(b"\n")).removesuffix(" (deleted)")
            if os.path.basename(path) not in names:
                continue
            try:
                yield os.stat(f"{PROC}/{pid}/map_files/{_range(fields[0])}")
            except (FileNotFoundError, ProcessLookupError):
                continue  # unmapped meanwhile


def _range(field: bytes) -> str:
    """`maps` pads addresses to eight digits, `map_files` does not."""
    return "-".join(f"{int(part, 16):x}" for part in field.split(b"-"))
