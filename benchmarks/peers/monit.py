"""monit: looks in cycles of one second, the shortest that it has; it is the parent of nothing that it starts."""

import shlex
from pathlib import Path

from benchmarks.peers.peer import PEERS, STOP_SECONDS, Peer, unpacked_environment, write_script

_HEAD = """set daemon 1
set pidfile {folder}/monit.pid
set idfile {folder}/monit.id
set statefile {folder}/monit.state
set httpd unixsocket {folder}/monit.sock allow admin:monit
"""
_CHECK = """check process {name} pidfile {folder}/{name}.pid
  start program = "{folder}/start-{name}" with timeout {wait} seconds
  stop program = "{folder}/stop-{name}" with timeout {wait} seconds
"""
_STOP = """pid=$(cat {file})
kill $pid
for i in $(seq {ticks}); do kill -0 $pid || exit 0; sleep 0.1; done
kill -9 $pid"""


class Monit(Peer):
    name = "monit"

    @classmethod
    def binary(cls) -> Path:
        return PEERS / "apt/usr/bin/monit"

    def variables(self) -> dict[str, str]:
        return unpacked_environment()

    @property
    def _file(self) -> Path:
        return self.folder / "monitrc"

    def configure(self) -> None:
        text = _HEAD.format(folder=self.folder)
        for service in self.services:
            name, pid = service.name, f"{self.folder}/{service.name}.pid"
            start = f"setsid {shlex.join(service.command)} >{self.folder}/{name}.log 2>&1 &\necho $! >{pid}"
            write_script(self.folder / f"start-{name}", start)
            write_script(self.folder / f"stop-{name}", _STOP.format(file=pid, ticks=STOP_SECONDS * 10))
            text += _CHECK.format(name=name, folder=self.folder, wait=STOP_SECONDS * 2)
        self._file.write_text(text)
        self._file.chmod(0o600)

    def command(self) -> list[str]:
        return [str(self.binary()), "-I", "-c", str(self._file)]

    def stop_command(self, service: str) -> list[str]:
        return [str(self.binary()), "-c", str(self._file), "stop", service]

    def restart_command(self, service: str) -> list[str]:
        return [str(self.binary()), "-c", str(self._file), "restart", service]
