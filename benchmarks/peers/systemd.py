"""systemd as PID 1 of namespaces of its own, on this machine's files: its units lie in the folder, nothing else of the
system is started, and the machine's own systemd, if there is one, is not touched. Without journald and dbus.
"""

import os
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

from benchmarks.peers.peer import STOP_SECONDS, Peer
from benchmarks.peers.service import until
from supervisor import proc
from supervisor.cgroup import Group, mount_point
from supervisor.demo import cleanup

_UNIT = """[Unit]
DefaultDependencies=no
StartLimitIntervalSec=0
[Service]
ExecStart={command}
Restart=always
RestartSec=0
TimeoutStopSec={stop}
StandardOutput=append:{folder}/{name}.log
"""
_BOOT = """set -e
mount --make-rprivate /
mount -t proc proc /proc
mount --bind /proc/sys /proc/sys
mount -o remount,bind,ro /proc/sys
umount -l /sys/fs/cgroup
mount -t cgroup2 none /sys/fs/cgroup
mount -t tmpfs tmpfs /run
mount -o remount,bind,ro /
exec env -i container=peers PEER_FOLDER={folder}/ PATH=/usr/sbin:/usr/bin:/sbin:/bin SYSTEMD_UNIT_PATH={folder}/units \
SYSTEMD_GENERATOR_PATH={folder}/generators SYSTEMD_LOG_TARGET=console \
{systemd} --system --unit=peers.target --show-status=0
"""
BOOT_SECONDS = 10.0


class Systemd(Peer):
    name = "systemd"
    restartable = False

    @classmethod
    def binary(cls) -> Path:
        found = next((path for path in ("/usr/lib/systemd/systemd", "/lib/systemd/systemd") if Path(path).exists()), "")
        return Path(found or "/usr/lib/systemd/systemd")

    @classmethod
    def unavailable(cls) -> str | None:
        missing = [name for name in ("unshare", "nsenter", "systemctl") if shutil.which(name) is None]
        if os.geteuid() != 0 or mount_point() is None:
            return "needs root and cgroup v2"
        if missing or not cls.binary().exists():
            return f"{', '.join(missing) or cls.binary()} is missing"
        return None

    @property
    def _group(self) -> str:
        return f"/{self.folder.parent.name}/{self.folder.name}"

    def configure(self) -> None:
        units = self.folder / "units"
        units.mkdir()
        (self.folder / "generators").mkdir()
        wants = " ".join(f"{service.name}.service" for service in self.services)
        (units / "peers.target").write_text(f"[Unit]\nDefaultDependencies=no\nWants={wants}\n")
        for service in self.services:
            text = _UNIT.format(
                command=shlex.join(service.command), stop=STOP_SECONDS, folder=self.folder, name=service.name
            )
            (units / f"{service.name}.service").write_text(text)
        Group.open(self._group, make=True).close()

    def command(self) -> list[str]:
        enter = f"echo $$ >{mount_point()}{self._group}/cgroup.procs"
        unshare = "unshare --cgroup --pid --fork --mount --ipc --uts sh -c"
        boot = _BOOT.format(folder=self.folder, systemd=self.binary())
        return ["sh", "-c", f"{enter} && exec {unshare} {shlex.quote(boot)}"]

    def stop_command(self, service: str) -> list[str]:
        return self._systemctl("stop", service)

    def restart_command(self, service: str) -> list[str]:
        return self._systemctl("restart", service)

    def own(self) -> list[int]:
        """Without the `unshare` that it was started by."""
        theirs = {pid for pids in self.pids().values() for pid in pids}
        starter = None if self.process is None else self.process.pid
        return [pid for pid in self._all() if pid not in theirs and pid != starter]

    def end(self) -> None:
        cleanup.remove_group(self._group)
        super().end()

    def _systemctl(self, what: str, service: str) -> list[str]:
        until(lambda: self._init() is not None, BOOT_SECONDS, "systemd as PID 1")
        return ["nsenter", "-t", str(self._init()), "-m", "-p", "systemctl", what, f"{service}.service"]

    def _init(self) -> int | None:
        return next((pid for pid in self._all() if (found := proc.stat(pid)) and found.comm == "systemd"), None)

    def _all(self) -> Iterator[int]:
        group = Group.open(self._group)
        try:
            yield from group.procs_below()
        finally:
            group.close()
