"""A throw-away etcd cluster on loopback: real members, for `gpuward demo --store etcd` and for the tests.

It does not survive its owner: members get SIGKILL when the thread that started them ends (PR_SET_PDEATHSIG, prctl(2)),
and the folder goes with them. Not for production: no TLS, no fsync, data in memory where /dev/shm is there.
"""

import contextlib
import ctypes
import fcntl
import json
import os
import random
import shutil
import signal
import socket
import ssl
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

PREFIX = "gpuward-etcd-"
ROOM = 200 << 20
"""Bytes of disk per member: etcd preallocates 122 MB of log (measured, 3.5.16)."""
HEARTBEAT_MS, ELECTION_MS = 50, 500
"""Writes work again 1.4 s after the leader was killed (measured on two busy cores)."""
START_LIMIT = 30.0
"""Seconds until a member must be healthy; 1.4 s is usual."""
PR_SET_PDEATHSIG = 1
INSTALLER = Path(__file__).parents[2] / "tools/install-etcd.sh"
"""Only in a checkout."""

_libc = ctypes.CDLL(None, use_errno=True)


class EtcdClusterError(Exception):
    """The cluster cannot be made, or does not do what it should; the text says what to do."""


def find_binaries() -> Path:
    """The folder with `etcd` and `etcdctl`: $GPUWARD_ETCD_DIR, else .cache/etcd/3.5 of a checkout, else on PATH."""
    named, found, checkout = os.environ.get("GPUWARD_ETCD_DIR"), shutil.which("etcd"), INSTALLER.is_file()
    folders = [Path(named)] if named else [INSTALLER.parents[1] / ".cache/etcd/3.5"] if checkout else []
    if found and not named:
        folders.append(Path(found).parent)
    for folder in folders:
        if os.access(folder / "etcd", os.X_OK) and os.access(folder / "etcdctl", os.X_OK):
            return folder
    looked = " or ".join(f"in {folder}" for folder in folders) + (" (GPUWARD_ETCD_DIR)" if named else "")
    places = looked if named else " or ".join(filter(None, (looked, "on PATH")))
    install = f"run {INSTALLER}, install" if checkout else "install"
    raise EtcdClusterError(
        f"no etcd and etcdctl {places}: {install} etcd 3.5 or later, or name their folder in GPUWARD_ETCD_DIR"
    )


@dataclass(frozen=True)
class ClientTls:
    """What a client of members with TLS needs: their CA, and a certificate with its key."""

    ca: Path
    cert: Path
    key: Path


class EtcdCluster:
    """`with EtcdCluster() as cluster:` - healthy on entry, gone on exit. Raises `EtcdClusterError`.

    `folder` takes the data in place of a temporary folder and stays; `arguments` go to every member; with `tls` clients
    use https, for which `arguments` must have etcd's files; `binaries` is the folder with another etcd and etcdctl.
    Members are numbered from 0.
    """

    def __init__(
        self,
        members: int = 3,
        *,
        folder: Path | None = None,
        arguments: Sequence[str] = (),
        tls: ClientTls | None = None,
        binaries: Path | None = None,
    ) -> None:
        self._members = members
        self._given_folder = folder
        self._arguments = tuple(arguments)
        self._tls = tls
        self._opener = _opener(tls)
        self._scheme = "http" if tls is None else "https"
        self._binaries, self._other = binaries or find_binaries(), binaries is not None
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._ports: list[tuple[int, int]] = []
        self._cleanup = contextlib.ExitStack()
        self.folder = folder or Path()

    @property
    def endpoints(self) -> list[str]:
        """Client addresses, such as `http://127.0.0.1:PORT`, in the order of the members."""
        return [f"{self._scheme}://127.0.0.1:{client}" for client, _ in self._ports]

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            self.folder = self._given_folder or self._cleanup.enter_context(_temporary_folder(self._members))
            self._cleanup.callback(self._end_all)
            self._first_start()
            undo.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Every member is gone, stopped ones too, and so is a temporary folder."""
        self._cleanup.close()

    def kill(self, member: int) -> None:
        """SIGKILL, and wait for the end."""
        process = self._processes.pop(member)
        process.kill()
        process.wait()

    def stop(self, member: int) -> None:
        """SIGSTOP: its sockets stay open and answer nothing."""
        os.kill(self._processes[member].pid, signal.SIGSTOP)

    def cont(self, member: int) -> None:
        os.kill(self._processes[member].pid, signal.SIGCONT)

    def restart(self, *members: int) -> None:
        """Start members that were killed, on the same data and ports; back when the whole cluster is healthy."""
        for member in members:
            self._start(member)
        self.wait_healthy()

    def move(self, member: int) -> str:
        """Gives a member that was killed an empty folder and other ports; its new address for the others."""
        shutil.rmtree(self.folder / f"m{member}")
        self._ports[member] = free_ports(1)[0]
        return f"http://127.0.0.1:{self._ports[member][1]}"

    def join(self, member: int) -> None:
        """Start one that the others know already by `etcdctl member add`; back when the whole cluster is healthy."""
        self._start(member, "--initial-cluster-state=existing")
        self.wait_healthy()

    def wait_healthy(self, limit: float = START_LIMIT) -> None:
        """Until every running member can commit; `limit` in seconds."""
        deadline = time.monotonic() + limit
        for member in sorted(self._processes):
            while not self._healthy(member):
                if self._processes[member].poll() is not None:
                    raise EtcdClusterError(f"etcd member {member} ended at its start: {self._last_words(member)}")
                if time.monotonic() > deadline:
                    raise EtcdClusterError(
                        f"etcd member {member} at {self.endpoints[member]} is not healthy after {limit:g} s: "
                        f"{self._last_words(member)}"
                    )
                time.sleep(0.02)

    def leader(self, limit: float = 10.0) -> int:
        """The member that leads, by what it says itself; waits up to `limit` seconds for an election."""
        deadline = time.monotonic() + limit
        while time.monotonic() < deadline:
            for member in sorted(self._processes):
                with contextlib.suppress(OSError, ValueError, KeyError):
                    status = self._ask(member, "/v3/maintenance/status", b"{}")
                    if status["leader"] == status["header"]["member_id"]:
                        return member
            time.sleep(0.02)
        raise EtcdClusterError(f"no member of {', '.join(self.endpoints)} led within {limit:g} s")

    def etcdctl(self, *arguments: str, timeout: float = 5.0) -> str:
        """What etcdctl prints; all endpoints are given to it. Raises `EtcdClusterError` with what it said."""
        command = [str(self._binaries / "etcdctl"), f"--endpoints={','.join(self.endpoints)}"]
        if self._tls is not None:
            command += [f"--cacert={self._tls.ca}", f"--cert={self._tls.cert}", f"--key={self._tls.key}"]
        command += [f"--command-timeout={timeout:g}s", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout + 5, check=False)
        if done.returncode != 0:
            raise EtcdClusterError(f"etcdctl {' '.join(arguments)}: {done.stderr.strip()}")
        return done.stdout

    def _first_start(self, attempts: int = 3) -> None:
        for attempt in range(attempts):
            self._ports = free_ports(self._members)
            for member in range(self._members):
                self._start(member)
            try:
                self.wait_healthy()
                return
            except EtcdClusterError as error:
                self._end_all()
                if attempt == attempts - 1 or "address already in use" not in str(error):
                    raise

    def _start(self, member: int, *more: str) -> None:
        client, peer = self._ports[member]
        peers = ",".join(f"m{i}=http://127.0.0.1:{port}" for i, (_, port) in enumerate(self._ports))
        command = [str(self._binaries / "etcd"), f"--name=m{member}", f"--data-dir={self.folder / f'm{member}'}"]
        command += [f"--{kind}-client-urls={self._scheme}://127.0.0.1:{client}" for kind in ("listen", "advertise")]
        command += [f"--listen-peer-urls=http://127.0.0.1:{peer}", "--log-level=warn"]
        command += [] if self._other else ["--unsafe-no-fsync"]  # which 3.4 does not have
        command += [f"--initial-advertise-peer-urls=http://127.0.0.1:{peer}", f"--initial-cluster={peers}"]
        command += [
            f"--heartbeat-interval={HEARTBEAT_MS}",
            f"--election-timeout={ELECTION_MS}",
            *self._arguments,
            *more,
        ]
        with self._log(member).open("wb") as log:
            self._processes[member] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                group=self._gid(member),
                preexec_fn=_die_with(os.getpid()),
            )

    def _gid(self, member: int) -> int | None:
        """The group that a member runs with; None: our own."""
        return None

    def _end_all(self) -> None:
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.wait()
        self._processes.clear()

    def _healthy(self, member: int) -> bool:
        try:
            return bool(self._ask(member, "/health")["health"] == "true")
        except (OSError, ValueError, KeyError):
            return False

    def _ask(self, member: int, path: str, body: bytes | None = None) -> dict[str, Any]:
        with self._opener.open(self.endpoints[member] + path, data=body, timeout=1.0) as reply:
            answer = json.load(reply)
        if not isinstance(answer, dict):
            raise ValueError(f"{path} of etcd member {member}: found {answer!r}, expected an object")
        return answer

    def _log(self, member: int) -> Path:
        return self.folder / f"m{member}.log"

    def _last_words(self, member: int) -> str:
        lines = self._log(member).read_text(errors="replace").splitlines()
        return lines[-1] if lines else "it said nothing"


def _opener(tls: ClientTls | None) -> urllib.request.OpenerDirector:
    handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
    if tls is not None:
        context = ssl.create_default_context(cafile=tls.ca)
        context.load_cert_chain(tls.cert, tls.key)
        handlers.append(urllib.request.HTTPSHandler(context=context))
    return urllib.request.build_opener(*handlers)


def _die_with(parent: int) -> Any:
    def in_child() -> None:
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)

    return in_child


def free_ports(pairs: int) -> list[tuple[int, int]]:
    """Ports that nobody listens on, below those that the kernel gives to outgoing connections, so that a member which
    is down for a while finds its port free."""
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    candidates = random.Random(os.urandom(8)).sample(range(min(10_000, low - 4000), low), 2000)
    found: list[int] = []
    with contextlib.ExitStack() as held:
        for port in candidates:
            probe = held.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", port))
                found.append(port)
            if len(found) == 2 * pairs:
                break
    return list(zip(found[::2], found[1::2], strict=True))


@contextlib.contextmanager
def _temporary_folder(members: int) -> Iterator[Path]:
    """A private folder, in memory where there is room; a flock on it marks it as in use, so that what an owner who
    was killed has left is found and removed."""
    memory = Path("/dev/shm")
    roomy = os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > members * ROOM
    parent = memory if roomy else Path(tempfile.gettempdir())
    for old in parent.glob(PREFIX + "*"):
        _remove_if_left_behind(old)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
    mark = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(mark, fcntl.LOCK_EX)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(mark)


def _remove_if_left_behind(folder: Path, settle: float = 60.0) -> None:
    with contextlib.suppress(OSError):
        mark = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            seen = os.fstat(mark)
            if seen.st_uid == os.geteuid() and time.time() - seen.st_mtime > settle:
                fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(mark)
