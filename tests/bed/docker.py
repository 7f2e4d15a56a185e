"""A private Docker engine and podman for tests, in two kinds of machine, with one small image that needs no registry.

The binaries come from tools/install-containers.sh, else from PATH. Everything of an engine lives in a folder and a
cgroup of its own, and ends with them; the machine's own engine, if there is one, is not touched.

A machine with hybrid cgroups is two machines: as it is, and, in a mount namespace, with cgroup v2 alone, as most are.
What runs in such a view still stands in the one cgroup v2 hierarchy of this kernel, so the test sees it from outside.
"""

import contextlib
import io
import json
import os
import shlex
import signal
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from supervisor.cgroup import Group, mount_point
from supervisor.demo import cleanup

ROOT = Path(__file__).parents[2]
UNPACKED = ROOT / ".cache" / "containers"
IMAGE = "box"
APPLETS = ("sh", "sleep", "cat", "env", "id", "touch", "true", "test", "kill", "ls", "readlink")
_V2_ALONE = 'umount -l /sys/fs/cgroup && mount -t cgroup2 none /sys/fs/cgroup && exec "$@"'
UNIFIED = ("unshare", "--mount", "sh", "-c", _V2_ALONE, "sh")
VIEWS = ["hybrid", "unified"] if mount_point() != "/sys/fs/cgroup" else ["unified"]


def view_words(view: str) -> tuple[str, ...]:
    """What a command is put behind, to run in such a machine."""
    return UNIFIED if view == "unified" and "hybrid" in VIEWS else ()


def binary(name: str) -> Path:
    """Of the unpacked packages, else on PATH. Without it the test fails, and says how to get it."""
    search = os.pathsep.join(
        [*(str(UNPACKED / folder) for folder in ("usr/bin", "usr/sbin", "bin")), os.environ["PATH"]]
    )
    for folder in search.split(os.pathsep):
        if os.access(f"{folder}/{name}", os.X_OK):
            return Path(folder) / name
    pytest.fail(f"{name} is not here: tools/install-containers.sh fetches it, or put it on PATH", pytrace=False)


def libraries() -> list[str]:
    """Folders with those of the unpacked packages."""
    return [str(path) for base in ("usr/lib", "lib") for path in (UNPACKED / base).glob("*-linux-gnu*")]


def environment() -> dict[str, str]:
    """For what runs out of the unpacked packages."""
    path = [str(UNPACKED / folder) for folder in ("usr/bin", "usr/sbin")]
    return {
        "PATH": ":".join([*path, os.environ["PATH"]]),
        "LD_LIBRARY_PATH": ":".join(libraries()),
        "HOME": "/nonexistent",
    }


def image() -> bytes:
    """A tar of busybox and its names."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for folder, mode in (("bin", 0o755), ("tmp", 0o1777), ("run", 0o755)):
            entry = tarfile.TarInfo(folder)
            entry.type, entry.mode = tarfile.DIRTYPE, mode
            tar.addfile(entry)
        tar.add(binary("busybox"), "bin/busybox")
        for name in APPLETS:
            entry = tarfile.TarInfo(f"bin/{name}")
            entry.type, entry.linkname = tarfile.SYMTYPE, "busybox"
            tar.addfile(entry)
    return out.getvalue()


def script(path: Path, text: str) -> Path:
    """An executable shell script."""
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def exports() -> str:
    """Lines of a script that set `environment`."""
    return "\n".join(f"export {name}={shlex.quote(value)}" for name, value in environment().items())


class Engine:
    """One dockerd with its containerd. `client` is the program that a configuration names."""

    def __init__(self, folder: Path, view: str) -> None:
        self.folder, self.view = folder, view
        self.cgroup = f"/gpuward-test-engine-{os.getpid()}-{view}"
        self.elsewhere = f"/gpuward-test-elsewhere-{os.getpid()}-{view}"
        """Where containers stand that were not asked to stand anywhere."""
        self.socket = folder / "docker.sock"
        self.hold = folder / "hold"
        """While it exists no container gets past the moment at which the engine calls its runtime."""
        self.held = folder / "held"
        """One waits there."""
        self.process: subprocess.Popen[bytes] | None = None
        self.client = script(folder / "docker", f'{exports()}\nexec {binary("docker")} "$@"')
        (folder / "daemon.json").write_text("{}")
        wait = f"touch {self.held}; while [ -e {self.hold} ]; do sleep 0.02; done; rm -f {self.held}"
        script(folder / "runtime", f'case " $* " in *" create "*) {wait} ;; esac\nexec {binary("runc")} "$@"')

    def start(self) -> None:
        """Returns when it answers; at once, if it runs."""
        if self.process is not None and self.process.poll() is None:
            return
        group = Group.open(self.cgroup, make=True)
        group.close()
        options = [
            *("--data-root", str(self.folder / "data"), "--exec-root", str(self.folder / "exec")),
            *("--host", f"unix://{self.socket}", "--pidfile", str(self.folder / "pid")),
            *("--config-file", str(self.folder / "daemon.json"), "--exec-opt", "native.cgroupdriver=cgroupfs"),
            *(
                "--cgroup-parent",
                self.elsewhere,
                "--iptables=false",
                "--ip6tables=false",
                "--bridge=none",
                "--storage-driver=vfs",
            ),
            *("--add-runtime", f"held={self.folder / 'runtime'}", "--default-runtime", "held"),
        ]
        enter = ["sh", "-c", f'echo $$ > {mount_point()}{self.cgroup}/cgroup.procs; exec "$@"', "sh"]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [*enter, *view_words(self.view), str(binary("dockerd")), *options],
                env=environment(), stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        end = time.monotonic() + 20
        while self.ask("version", "--format", "{{.Server.Version}}", check=False).returncode:
            assert time.monotonic() < end, (self.folder / "log").read_text()[-3000:]
            time.sleep(0.05)
        if not self.ask("images", "--quiet").stdout:
            self.ask("import", "-", IMAGE, stdin=image())

    def ask(self, *words: str, check: bool = True, stdin: bytes = b"") -> "subprocess.CompletedProcess[bytes]":
        """The client's answer, within 20 s."""
        return subprocess.run(
            [str(self.client), "--host", f"unix://{self.socket}", *words],
            input=stdin, capture_output=True, timeout=20, check=check,
        )  # fmt: skip

    def containers(self) -> list[str]:
        """Names of all, whatever state they are in."""
        return self.ask("ps", "--all", "--format", "{{.Names}}").stdout.decode().split()

    def inspect(self, name: str) -> dict[str, Any]:
        found: list[dict[str, Any]] = json.loads(self.ask("container", "inspect", name).stdout)
        return found[0]

    def pid(self, name: str) -> int:
        """Of the container's first process."""
        return int(self.inspect(name)["State"]["Pid"])

    def signal(self, number: int) -> None:
        """To dockerd itself."""
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        """A crash of dockerd, with which its containerd dies: shims, and what runs in containers, go on."""
        assert self.process is not None
        self.signal(signal.SIGKILL)
        self.process.wait(10)
        # A containerd that init has not reaped yet counts as running for the next dockerd.
        (self.folder / "exec" / "containerd" / "containerd.pid").unlink(missing_ok=True)

    def end(self) -> None:
        """Leaves nothing behind."""
        self.hold.unlink(missing_ok=True)
        if self.process is not None and self.process.poll() is None:
            self.signal(signal.SIGCONT)
            with contextlib.suppress(subprocess.SubprocessError):
                ids = self.ask("ps", "--all", "--quiet").stdout.decode().split()
                self.ask("rm", "--force", "--volumes", *ids, check=False)
            self.kill()
        for path in (self.cgroup, self.elsewhere):
            cleanup.remove_group(path)
            remove_v1(path)
        unmount_below(self.folder)


def unmount_below(folder: Path) -> None:
    """What a killed engine left mounted there."""
    mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    for mount in sorted((path for path in mounts if path.startswith(f"{folder}/")), reverse=True):
        subprocess.run(["umount", "-l", mount], check=True)


def remove_v1(path: str) -> None:
    """What runc left of a cgroup path in the hierarchies of v1."""
    for line in Path("/proc/mounts").read_text().splitlines():
        mount, kind = line.split()[1:3]
        if kind == "cgroup":
            for folder, _, _ in os.walk(f"{mount}{path}", topdown=False):
                with contextlib.suppress(OSError):
                    os.rmdir(folder)


@contextlib.contextmanager
def engine_in(view: str) -> Iterator[Engine]:
    """An engine for some tests, which end what they start in it."""
    if mount_point() is None or not os.access(f"{mount_point()}/cgroup.procs", os.W_OK):
        pytest.skip("needs a writable cgroup2 mount (root)")
    with tempfile.TemporaryDirectory(prefix="gpuward-test-") as name:  # short: a socket lies in it
        engine = Engine(Path(name), view)
        try:
            engine.start()
            yield engine
        finally:
            engine.end()


@contextlib.contextmanager
def podman_client() -> Iterator[Path]:
    """A podman with storage and configuration of its own, and the image; for the view `unified`."""
    # A short path: below a long one the sockets do not fit, and `podman run` never learns that its container has ended.
    with tempfile.TemporaryDirectory(prefix="gpuward-test-") as name:
        try:
            yield _podman_in(Path(name))
        finally:
            unmount_below(Path(name))


def _podman_in(folder: Path) -> Path:
    (folder / "containers.conf").write_text(
        # This machine's root may lack CAP_SYS_RESOURCE, so podman's own higher limits cannot be set.
        '[containers]\ndefault_ulimits = ["nofile=1024:1024", "nproc=1000:1000"]\npids_limit = 0\n'
        f'[engine]\nruntime = "runc"\ncgroup_manager = "cgroupfs"\nevents_logger = "file"\n'
        f'conmon_path = ["{binary("conmon")}"]\n[engine.runtimes]\nrunc = ["{binary("runc")}"]\n'
        '[network]\nnetwork_backend = "cni"\n'
    )
    (folder / "storage.conf").write_text(
        f'[storage]\ndriver = "vfs"\nrunroot = "{folder}/run"\ngraphroot = "{folder}/root"\n'
    )
    (folder / "registries.conf").write_text("unqualified-search-registries = []\n")
    (folder / "policy.json").write_text('{"default": [{"type": "insecureAcceptAnything"}]}')
    names = {"CONF": "containers", "STORAGE_CONF": "storage", "REGISTRIES_CONF": "registries"}
    lines = [f"export CONTAINERS_{name}={folder}/{file}.conf" for name, file in names.items()]
    # conmon calls podman for the clean-up, without LD_LIBRARY_PATH: so it gets the libraries by a cache of the linker.
    (folder / "ld.conf").write_text("".join(f"{path}\n" for path in libraries()) + "include /etc/ld.so.conf\n")
    subprocess.run(["ldconfig", "-C", str(folder / "ld.cache"), "-f", str(folder / "ld.conf")], check=True)
    enter = f"mount --bind {folder}/ld.cache /etc/ld.so.cache && exec {binary('podman')} --tmpdir {folder}/tmp"
    client = script(
        folder / "podman", "\n".join([exports(), *lines, f'exec unshare --mount sh -c \'{enter} "$@"\' podman "$@"'])
    )
    (folder / "image.tar").write_bytes(image())
    signed = ["--signature-policy", str(folder / "policy.json")]
    done = subprocess.run(
        [*view_words("unified"), str(client), "import", *signed, str(folder / "image.tar"), IMAGE],
        capture_output=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()
    return client
