"""supervisord: a loop in Python that reaps and restarts once a second."""

import shlex
from pathlib import Path

from benchmarks.peers.peer import PEERS, STOP_SECONDS, Peer

_HEAD = """[supervisord]
nodaemon = true
logfile = {folder}/supervisord.log
pidfile = {folder}/supervisord.pid
childlogdir = {folder}
user = root

[unix_http_server]
file = {folder}/sock

[rpcinterface:supervisor]
supervisor.rpcinterface_factory = supervisor.rpcinterface:make_main_rpcinterface

[supervisorctl]
serverurl = unix://{folder}/sock
"""
_PROGRAM = """
[program:{name}]
command = {command}
autorestart = true
stopwaitsecs = {stop}
"""


class Supervisord(Peer):
    name = "supervisord"

    @classmethod
    def binary(cls) -> Path:
        return PEERS / "supervisord/bin/supervisord"

    @property
    def _file(self) -> Path:
        return self.folder / "supervisord.conf"

    def configure(self) -> None:
        text = _HEAD.format(folder=self.folder)
        for service in self.services:
            text += _PROGRAM.format(name=service.name, command=shlex.join(service.command), stop=STOP_SECONDS)
        self._file.write_text(text)

    def command(self) -> list[str]:
        return [str(self.binary()), "-c", str(self._file)]

    def stop_command(self, service: str) -> list[str]:
        return self._control("stop", service)

    def restart_command(self, service: str) -> list[str]:
        return self._control("restart", service)

    def _control(self, what: str, service: str) -> list[str]:
        return [str(self.binary().with_name("supervisorctl")), "-c", str(self._file), what, service]
