"""circus: one Python process on ZeroMQ, which looks after its children every 0.1 s (by default every 5 s)."""

import shlex
from pathlib import Path

from benchmarks.peers.peer import PEERS, STOP_SECONDS, Peer

_HEAD = """[circus]
check_delay = 0.1
endpoint = ipc://{folder}/control
pubsub_endpoint = ipc://{folder}/events
"""
_WATCHER = """
[watcher:{name}]
cmd = {command}
numprocesses = 1
graceful_timeout = {stop}
max_retry = -1
"""


class Circus(Peer):
    name = "circus"

    @classmethod
    def binary(cls) -> Path:
        return PEERS / "circus/bin/circusd"

    @property
    def _file(self) -> Path:
        return self.folder / "circus.ini"

    def configure(self) -> None:
        text = _HEAD.format(folder=self.folder)
        for service in self.services:
            text += _WATCHER.format(name=service.name, command=shlex.join(service.command), stop=STOP_SECONDS)
        self._file.write_text(text)

    def command(self) -> list[str]:
        return [str(self.binary()), str(self._file)]

    def stop_command(self, service: str) -> list[str]:
        return self._control("stop", service)

    def restart_command(self, service: str) -> list[str]:
        return self._control("restart", service)

    def _control(self, what: str, service: str) -> list[str]:
        program = self.binary().with_name("circusctl")
        return [str(program), "--endpoint", f"ipc://{self.folder}/control", what, service, "--waiting"]
