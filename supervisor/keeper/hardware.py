"""The machine's own watchdog, the last resort: it resets a machine on which neither supervisor nor keeper ends a term.

While a term is armed the device is open and written to ("petted") at least every quarter of its timeout, but never
after `deadline + after - timeout`: so it strikes at `deadline + after`, which is the TTL, the moment from which another
node may claim, or earlier where nothing pets it any more. Once nothing of the term is left it is disarmed by the magic
close. A keeper that was killed leaves it running, and the next one goes on. Constants are of linux/watchdog.h; see the
kernel's Documentation/watchdog/watchdog-api.rst.

To open such a device starts it, so what cannot be stopped again must not even be tried: under `nowayout` the kernel
takes the magic close and goes on counting (watchdog_stop in watchdog_dev.c), and only sysfs tells of it beforehand.
"""

import errno
import fcntl
import os
import stat
import struct
from typing import NamedTuple

GETSUPPORT = 0x80285700
SETTIMEOUT, GETTIMEOUT = 0xC0045706, 0x80045707
_INFO = struct.Struct("II32s")
"""struct watchdog_info: options, firmware version, identity."""
CAN_SET_TIMEOUT, MAGIC_CLOSE = 0x0080, 0x0100
_MISC = (10, 130)
"""/dev/watchdog (WATCHDOG_MINOR of linux/miscdevice.h): another name of /dev/watchdog0."""
_FINAL_NS = 50_000_000
"""Between the final pet and the last moment for one: as late as the keeper's loop may be without harm."""


class Device(NamedTuple):
    path: str
    timeout_s: int
    after_ns: int
    """From the switch to the TTL."""


def last_pet(deadline_ns: int, device: Device) -> int:
    """After this moment (boot time) it must not be petted: it would strike too late."""
    return deadline_ns + device.after_ns - device.timeout_s * 1_000_000_000


def due(petted_ns: int, deadline_ns: int, device: Device) -> int | None:
    """When to pet next (boot time): a quarter of the timeout after the last time, and once just before the last
    moment, so that it does not strike while the switch does its work. None: not with this deadline."""
    final = last_pet(deadline_ns, device) - _FINAL_NS
    return None if petted_ns >= final else min(petted_ns + device.timeout_s * 250_000_000, final)


class Hardware:
    """One device. It is open exactly while a term is armed, or ends."""

    def __init__(self, device: Device) -> None:
        """Looks whether it will do, and leaves it disarmed. Raises OSError that says what is wrong with it."""
        self.device = device
        self._fd = -1
        self._petted_ns = 0
        self._open()
        self.disarm()

    def _open(self) -> None:
        path, wanted = self.device.path, self.device.timeout_s
        try:
            _check_stoppable(path)
            fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        except OSError as error:
            used = ": something else uses it, say RuntimeWatchdogSec of systemd" if error.errno == errno.EBUSY else ""
            raise OSError(f"hardware watchdog {path}: {error.strerror or error}{used}") from None
        try:
            options, _, _ = _INFO.unpack(fcntl.ioctl(fd, GETSUPPORT, bytes(_INFO.size)))
            granted = self._set_timeout(fd, wanted) if options & CAN_SET_TIMEOUT else 0
        except OSError as error:
            _close(fd)
            raise OSError(f"hardware watchdog {path}: it takes no timeout ({error.strerror})") from None
        if not options & MAGIC_CLOSE:
            _close(fd)
            raise OSError(f"hardware watchdog {path}: it stops when the keeper is killed (it knows no magic close)")
        if granted != wanted:
            _close(fd)
            raise OSError(f"hardware watchdog {path}: asked for a timeout of {wanted} s, it takes {granted or 'none'}")
        self._fd = fd

    @staticmethod
    def _set_timeout(fd: int, wanted: int) -> int:
        fcntl.ioctl(fd, SETTIMEOUT, struct.pack("i", wanted))
        return int(struct.unpack("i", fcntl.ioctl(fd, GETTIMEOUT, bytes(4)))[0])

    def arm(self, now_ns: int, deadline_ns: int) -> None:
        """A term is armed, or its deadline was moved on. Raises OSError where the device cannot be opened."""
        if self._fd < 0:
            self._open()
        self.turn(now_ns, deadline_ns)

    def turn(self, now_ns: int, deadline_ns: int) -> None:
        """Pets it where that is due."""
        when = due(self._petted_ns, deadline_ns, self.device)
        if self._fd >= 0 and when is not None and when <= now_ns <= last_pet(deadline_ns, self.device):
            os.write(self._fd, b"\0")
            self._petted_ns = now_ns

    def wait_s(self, now_ns: int, deadline_ns: int) -> float:
        """Seconds until `turn` has something to do; inf: nothing any more."""
        when = due(self._petted_ns, deadline_ns, self.device)
        late = now_ns > last_pet(deadline_ns, self.device)
        return float("inf") if self._fd < 0 or when is None or late else max(0.0, (when - now_ns) / 1e9)

    def disarm(self) -> None:
        """Nothing of the term is left."""
        fd, self._fd, self._petted_ns = self._fd, -1, 0
        if fd >= 0:
            _close(fd)


def _check_stoppable(path: str) -> None:
    """Raises OSError unless it is a watchdog that can be stopped. Nothing is opened but sysfs."""
    found = os.stat(path)
    number = (os.major(found.st_rdev), os.minor(found.st_rdev))
    if not stat.S_ISCHR(found.st_mode):
        raise OSError("it is not a device")
    folder = "/sys/class/watchdog/watchdog0" if number == _MISC else "/sys/dev/char/{}:{}".format(*number)
    try:
        with open(f"{folder}/nowayout") as file:
            text = file.read().strip()
    except OSError as error:
        raise OSError(f"not a watchdog, or one that tells nothing ({folder}/nowayout: {error.strerror})") from None
    if text != "0":
        raise OSError("it cannot be stopped once it runs (nowayout), so it is of no use here")


def _close(fd: int) -> None:
    """Of a watchdog, and of nothing else: the magic close stops it."""
    try:
        os.write(fd, b"V")
    finally:
        os.close(fd)
