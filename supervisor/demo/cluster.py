"""Three nodes of a demo on one machine: processes, folders, cgroups and ports, and ways to break them.

    gpuward-demo-ID/nodeN/agents      supervisor and keeper of a node      (cgroups, where they can be made)
    gpuward-demo-ID/nodeN/fence       its services

`kill_node` ends all of a node in one moment, as a power cut would. Without cgroups, the processes of a node are
found by their environment.
"""

import contextlib
import ctypes
import json
import os
import pwd
import secrets
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import yaml

from supervisor.cgroup import Group, mount_point
from supervisor.demo import cleanup, mounts, sample, skewed
from supervisor.demo.etcd_cluster import ROOM, EtcdCluster, free_ports
from supervisor.gpu.simulated import device_file

CLUSTER = "demo"
NODES = ("node1", "node2", "node3")
SERVICES = 8
MARK = "GPUWARD_DEMO"
"""Environment variable of every process of a node: the node's folder. By it they are found again."""
MEMBERS = 3
DISK = 16 << 20
"""Bytes of a small disk."""
LONGEST_FOLDER = 60
"""Bytes. The keeper's sockets lie deeper, and unix(7) allows 107."""
PR_SET_PDEATHSIG = 1
_SOURCE = Path(__file__).parents[2]

_libc = ctypes.CDLL(None, use_errno=True)


class DemoNode:
    """One node: its folder, its address, its supervisor."""

    def __init__(self, name: str, folder: Path, port: int, group: str | None) -> None:
        self.name = name
        self.folder = folder
        self.port = port
        self.group = group
        """The node's cgroup, if it has one."""
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def config(self) -> Path:
        return self.folder / "config.yaml"

    @property
    def run(self) -> Path:
        return self.folder / "run"

    @property
    def turns_file(self) -> Path:
        return self.folder / "turns"

    @property
    def output(self) -> Path:
        """What the supervisor prints."""
        return self.folder / "log/supervisor.out"

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def clock(self) -> Path:
        return self.folder / "clock"

    def set_clock(self, seconds: float) -> None:
        """By so much its wall clock is wrong."""
        skewed.set_offset(self.clock, seconds)

    def turns(self) -> int:
        """Turns on the GPU that services of this node have had."""
        try:
            return self.turns_file.read_bytes().count(b"\n")
        except FileNotFoundError:
            return 0

    def last_lines(self, count: int = 8) -> list[str]:
        """The end of what its supervisor printed."""
        with contextlib.suppress(FileNotFoundError):
            return self.output.read_text(errors="replace").splitlines()[-count:]
        return []


class DemoCluster:
    """`with DemoCluster("local", ttl=9) as cluster:` - supervisors started on entry, nothing left on exit.

    Must be entered from the main thread: supervisors and etcd members die with the thread that started them.
    """

    def __init__(self, store: str, ttl: int, *, small_disks: bool = False, own_clocks: bool = False) -> None:
        """`small_disks`: each node's folder is a file system of its own, of `DISK` bytes; needs root. `own_clocks`:
        wall clocks that can be set (`DemoNode.set_clock`)."""
        self.store = store
        self.ttl = ttl
        self.small_disks = small_disks
        self.own_clocks = own_clocks
        self.nodes: dict[str, DemoNode] = {}
        self.etcd: EtcdCluster | None = None
        self.folder = Path()
        self.group: str | None = None
        self._guardian: subprocess.Popen[bytes] | None = None
        self._cleanup = contextlib.ExitStack()

    @property
    def containment(self) -> str:
        """As in the supervisors' status."""
        return "cgroup" if self.group else "process-group"

    @property
    def store_file(self) -> Path:
        return self.folder / "election.db"

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            self._make_place()
            if self.store == "etcd":
                data = self.folder / "etcd"
                data.mkdir()
                self.etcd = self._cleanup.enter_context(self._make_etcd(data))
            for node in self.nodes.values():
                self._write_config(node)
                self.start_node(node.name)
            undo.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """No process, cgroup or folder of this demo is left; raises OSError naming what is."""
        self._cleanup.close()

    def start_node(self, name: str) -> None:
        """Start (or start again) the supervisor of a node; it starts or adopts its keeper."""
        node = self.nodes[name]
        agents = Group.open(f"{node.group}/agents", make=True) if node.group else None
        environ = self._environ() | {MARK: f"{node.folder}/"}
        command = [sys.executable, "-m", "supervisor.entry", "run", "--config", str(node.config)]
        if self.own_clocks:
            command = [sys.executable, "-m", "supervisor.cli.skewed", str(node.config), str(node.clock)]
            node.set_clock(0)
        with node.output.open("ab") as output:
            node.process = subprocess.Popen(
                command,
                cwd=node.folder,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=_into(agents, os.getpid()),
            )
        if agents:
            agents.close()

    def on_exit(self, work: Callable[[], None]) -> None:
        """To be done before the processes of the demo are ended."""
        self._cleanup.callback(work)

    def kill_supervisor(self, name: str) -> None:
        """SIGKILL to the supervisor alone."""
        process = self._supervisor(name)
        process.kill()
        process.wait()

    def stop_supervisor(self, name: str) -> None:
        """SIGSTOP to the supervisor alone."""
        self._supervisor(name).send_signal(signal.SIGSTOP)

    def continue_supervisor(self, name: str) -> None:
        self._supervisor(name).send_signal(signal.SIGCONT)

    def kill_node(self, name: str) -> None:
        """SIGKILL to supervisor, keeper and all services of the node in one moment; back when all are gone."""
        node = self.nodes[name]
        if node.group:
            cleanup.kill_group(node.group)
        cleanup.kill_all(node.folder)
        if node.process is not None:
            node.process.wait()

    def _supervisor(self, name: str) -> "subprocess.Popen[bytes]":
        process = self.nodes[name].process
        if process is None:
            raise RuntimeError(f"{name} has no supervisor")
        return process

    def _make_place(self) -> None:
        number = secrets.token_hex(4)
        self.folder = Path(tempfile.mkdtemp(prefix=f"gpuward-demo-{number}-", dir=_parent_folder(self.store)))
        self._cleanup.callback(self._end_all)
        self.group = _make_group(f"gpuward-demo-{number}")
        self._guardian = cleanup.start_guardian(self.folder, self.group, self._environ())
        ports = [port for pair in free_ports(len(NODES)) for port in pair]
        for name, port in zip(NODES, ports, strict=False):
            folder = self.folder / name
            if self.small_disks:
                folder.mkdir()
                mounts.small_disk(folder, DISK)
            for part in ("run", "state", "log", "gpu"):
                (folder / part).mkdir(parents=True, mode=0o755)
            self.nodes[name] = DemoNode(name, folder, port, f"{self.group}/{name}" if self.group else None)

    def _end_all(self) -> None:
        try:
            cleanup.end_all(self.folder, self.group)
        finally:
            for node in self.nodes.values():
                if node.process is not None:
                    node.process.kill()
                    node.process.wait()
            if self._guardian is not None:
                cleanup.dismiss(self._guardian)

    def _environ(self) -> dict[str, str]:
        """Of every process that the demo starts: none of our own variables, and a way to find the package."""
        environ = {key: value for key, value in os.environ.items() if not key.startswith("GPUWARD_")}
        if str(_SOURCE) not in sysconfig.get_paths().values():
            environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(_SOURCE), environ.get("PYTHONPATH"))))
        return environ

    def _make_etcd(self, data: Path) -> EtcdCluster:
        return EtcdCluster(MEMBERS, folder=data)

    def _endpoints(self, node: DemoNode) -> list[str]:
        """The members, as this node reaches them."""
        assert self.etcd is not None
        return self.etcd.endpoints

    def _write_config(self, node: DemoNode) -> None:
        node.config.write_text(yaml.safe_dump(self._config(node), sort_keys=False))

    def _config(self, node: DemoNode) -> dict[str, Any]:
        election: dict[str, Any] = {"ttl": self.ttl, "store": self.store}
        if self.etcd:
            election["etcd"] = {"endpoints": self._endpoints(node)}
        else:
            election["local"] = {"file": str(self.store_file)}
        return {
            "cluster": CLUSTER,
            "node": node.name,
            "election": election,
            "paths": {part: str(node.folder / part) for part in ("run", "state", "log")},
            "cgroup": f"{node.group.strip('/')}/fence" if node.group else "gpuward-demo",
            "allow_weak_containment": True,
            "gpu": {
                "driver": "simulated",
                "lock_file": str(node.run / "gpu-{index}.lock"),
                "simulated": {"folder": str(node.folder / "gpu"), "count": 1},
            },
            "api": {"listen": f"127.0.0.1:{node.port}"},
            "watchdog": {"interval": "2s", "confirm": "500ms"},
            "services": {f"turn-{number}": self._service(node) for number in range(1, SERVICES + 1)},
        }

    def _service(self, node: DemoNode) -> dict[str, Any]:
        lock_run = [sys.executable, "-m", "supervisor.entry", "lock", "run", "--gpu", "0", "--"]
        environ = {
            MARK: f"{node.folder}/",
            sample.LOCK_RUN: json.dumps(lock_run),
            sample.DEVICE: str(device_file(node.folder / "gpu", 0)),
            sample.TURNS: str(node.turns_file),
        }
        if path := self._environ().get("PYTHONPATH"):
            environ["PYTHONPATH"] = path
        return {
            "command": [sys.executable, "-I", "-S", sample.__file__],
            "env": environ,
            "user": _own_user(),
            "cwd": "/",
            "gpu": 0,
            "lock": "on-demand",
            "ready_after": "500ms",
            "stop_timeout": "2s",
        }


def _into(group: Group | None, parent: int) -> Callable[[], None]:
    def in_child() -> None:
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)
        if group:
            group.enter(0)

    return in_child


def _make_group(name: str) -> str | None:
    """The demo's cgroup; None where none can be made, or where processes cannot be moved into it."""
    if os.geteuid() != 0 or mount_point() is None:
        return None
    try:
        Group.open(f"/{name}/probe", make=True).close()
        cleanup.remove_group(f"/{name}/probe")
    except OSError:
        return None
    return f"/{name}"


def _parent_folder(store: str) -> str:
    """Where the demo's folder goes: etcd's data into memory where there is room, and no path longer than a socket's."""
    memory = Path("/dev/shm")
    if store == "etcd" and os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > MEMBERS * ROOM:
        return str(memory)
    parent = tempfile.gettempdir()
    return parent if len(os.fsencode(parent)) <= LONGEST_FOLDER - len("/gpuward-demo-01234567-01234567") else "/tmp"


def _own_user() -> str | int:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return os.geteuid()
