"""The keeper process: `python -I -S …/supervisor/keeper/__main__.py --run DIR (--cgroup PATH | --weak)`.

Options: `--run DIR` the run folder; `--cgroup PATH` the fenced parent, below the cgroup2 mount (made if missing);
`--weak` no cgroups (weak.py); `--group NAME_OR_GID` who may use keeper.sock; `--detach` return when the sockets answer,
and go on in the background; `--hardware PATH,TIMEOUT_S,AFTER_NS,automatic|required` the machine's watchdog
(hardware.py).
"""

import contextlib
import fcntl
import gc
import os
import resource
import signal
import sys

from supervisor.cgroup import Group
from supervisor.flock import flock_pid
from supervisor.keeper import kernel, term
from supervisor.keeper.control import Control
from supervisor.keeper.core import Keeper
from supervisor.keeper.hardware import Device
from supervisor.keeper.jobs import MODES
from supervisor.keeper.loop import Loop, log
from supervisor.keeper.packets import Connection, Packet, listen
from supervisor.keeper.places import CgroupPlaces, Places
from supervisor.keeper.protocol import CONTROL_SOCKET, JOB_SOCKET, NOTIFY_SOCKET
from supervisor.keeper.weak import WeakPlaces

_USAGE = "usage: keeper --run DIR (--cgroup PATH | --weak) [--group NAME_OR_GID] [--hardware SPEC] [--detach]"


def main(argv: list[str]) -> int:
    """Run until `quit` or SIGTERM with no term armed. 0; 64 wrong usage; 1 could not start (stderr says why)."""
    options = _parse(argv)
    if options is None:
        print(_USAGE, file=sys.stderr)
        return 64
    ready = _detach() if "--detach" in options else None
    try:
        keeper, loop = _set_up(options)
    except (OSError, LookupError, ValueError) as error:
        print(f"keeper: cannot start: {error}", file=sys.stderr)
        return 1
    if ready is not None:
        os.write(ready, b"1")
        os.close(ready)
    while not keeper.stopped:
        loop.once(keeper.tick_s())
        keeper.turn()
    return 0


def _parse(argv: list[str]) -> dict[str, str] | None:
    options: dict[str, str] = {}
    rest = list(argv)
    while rest:
        name = rest.pop(0)
        if name in ("--weak", "--detach"):
            options[name] = ""
        elif name in ("--run", "--cgroup", "--group", "--hardware") and rest:
            options[name] = rest.pop(0)
        else:
            return None
    return options if "--run" in options and ("--weak" in options) != ("--cgroup" in options) else None


def _detach() -> int:
    """Fork: the parent leaves with 0 once the child has written to the returned fd, with 1 if it ends without."""
    reading, writing = os.pipe2(os.O_CLOEXEC)
    if os.fork():
        os.close(writing)
        os._exit(0 if os.read(reading, 1) else 1)
    os.close(reading)
    os.setsid()
    return writing


def _set_up(options: dict[str, str]) -> tuple[Keeper, Loop]:
    run = os.path.abspath(options["--run"])
    gid = _gid(options.get("--group"))
    os.chdir("/")
    os.umask(0o077)
    kernel.set_name("gpuward-keeper")
    kernel.real_time()
    _only_one(f"{run}/keeper.pid")
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    loop = Loop()
    keeper = Keeper(run, _places(options), loop)
    if "--hardware" in options:
        keeper.use_hardware(*_hardware(options["--hardware"]))
    _watch_signals(keeper, loop)
    keeper.start_up()
    keeper.hear(f"{run}/{NOTIFY_SOCKET}")
    control = listen(f"{run}/{CONTROL_SOCKET}", 0o600, None)
    found = os.stat(f"{run}/{CONTROL_SOCKET}")
    keeper.home = (f"{run}/{CONTROL_SOCKET}", found.st_dev, found.st_ino)
    jobs = listen(f"{run}/{JOB_SOCKET}", 0o660, gid)
    loop.add(jobs.fileno(), lambda _: keeper.jobs.accept(jobs, lambda c, p: _job_request(keeper, c, p)))
    gc.collect()
    gc.freeze()
    Control(keeper, loop, control, kernel.lock_memory())
    return keeper, loop


def _hardware(spec: str) -> tuple[Device, bool]:
    """The device, and whether it is required."""
    path, timeout_s, after_ns, mode = spec.rsplit(",", 3)
    return Device(path, int(timeout_s), int(after_ns)), mode == "required"


def _places(options: dict[str, str]) -> Places:
    if "--weak" in options:
        kernel.become_subreaper()
        return WeakPlaces()
    parent = Group.open(options["--cgroup"], make=True)
    try:
        fcntl.flock(parent.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        found = os.fstat(parent.fd)
        pid = flock_pid(found.st_dev, found.st_ino)
        raise OSError(f"cgroup {parent.path}: another keeper has it, pid {pid or 'unknown'}") from None
    return CgroupPlaces(parent)


def _only_one(path: str) -> None:
    """One keeper per run folder. The fd stays open for as long as we live."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise OSError(f"{path}: another keeper runs, pid {os.read(fd, 20).decode(errors='replace').strip()}") from None
    with contextlib.suppress(OSError):  # no space: the text is for people, the flock is what counts
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)


def _gid(name: str | None) -> int | None:
    if name is None or name.isdigit():
        return None if name is None else int(name)
    import grp

    return grp.getgrnam(name).gr_gid


def _watch_signals(keeper: Keeper, loop: Loop) -> None:
    """SIGTERM ends a keeper that has no term; SIGCHLD matters to a subreaper."""
    reading, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(signum, lambda *_: None)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)

    def woken(_: int) -> None:
        with contextlib.suppress(BlockingIOError):
            signals = set(os.read(reading, 4096))
            if signal.SIGCHLD in signals and keeper.weak:
                keeper.services.reap_orphans()
            if signals & {signal.SIGTERM, signal.SIGINT}:
                if keeper.ledger.term is None:
                    keeper.stopped = True
                else:
                    log("asked to stop while a term is armed: not before it has ended")

    loop.add(reading, woken)


def _job_request(keeper: Keeper, connection: Connection, packet: Packet | None) -> None:
    answer = _decide_job(keeper, connection, packet)
    if answer.get("gpu") is None or not answer["ok"]:  # on success it was sent with the fd
        connection.send(answer)
    if packet is None or packet.get("mode") != "scope" or not answer["ok"]:
        connection.close()


def _decide_job(keeper: Keeper, connection: Connection, packet: Packet | None) -> Packet:
    if packet is not None and packet.get("op") == "leave":
        return keeper.jobs.leave(connection, packet.get("gpu"))
    mode = "" if packet is None else packet.get("mode", "exec")
    gpu = None if packet is None else packet.get("gpu")
    if packet is None or packet.get("op") != "enter" or mode not in MODES or not isinstance(gpu, int):
        return {"ok": False, "reason": "malformed", "message": "expected enter {gpu, command, mode}, or leave"}
    refusal = term.admit(keeper.ledger, None, kernel.boot_ns())
    if refusal is not None or keeper.place is None:
        return {"ok": False, "reason": "no-authority", "message": refusal.message if refusal else "no term"}
    lock = keeper.locks.get(gpu)
    if lock is None:
        return {"ok": False, "reason": "no-such-gpu", "message": f"no lock is configured for GPU {gpu}"}
    return keeper.jobs.enter(connection, packet, keeper.place, lock, mode)
