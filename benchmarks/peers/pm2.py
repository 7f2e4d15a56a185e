"""pm2: a daemon on Node.js, started by its own command line."""

import json
import shutil
from pathlib import Path

from benchmarks.peers.peer import PEERS, STOP_SECONDS, Peer


class Pm2(Peer):
    name = "pm2"

    @classmethod
    def binary(cls) -> Path:
        return PEERS / "pm2/node_modules/pm2/bin/pm2"

    @classmethod
    def unavailable(cls) -> str | None:
        return super().unavailable() or (None if shutil.which("node") else "node is not on PATH")

    def variables(self) -> dict[str, str]:
        return {"PM2_HOME": f"{self.folder}/home", "HOME": str(self.folder), "PM2_DISABLE_VERSION_CHECK": "true"}

    @property
    def _file(self) -> Path:
        return self.folder / "ecosystem.json"

    def configure(self) -> None:
        apps = [
            {
                "name": service.name,
                "script": service.command[0],
                "args": service.command[1:],
                "interpreter": "none",
                "exec_mode": "fork",
                "kill_timeout": STOP_SECONDS * 1000,
                "max_restarts": 1_000_000,
            }
            for service in self.services
        ]
        self._file.write_text(json.dumps({"apps": apps}))

    def command(self) -> list[str]:
        return [str(self.binary()), "start", str(self._file)]

    def stop_command(self, service: str) -> list[str]:
        return [str(self.binary()), "stop", service]

    def restart_command(self, service: str) -> list[str]:
        return [str(self.binary()), "restart", service]
