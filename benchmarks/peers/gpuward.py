"""gpuward itself: `gpuward run` on the local store and a simulated GPU, with the TTL of a real node."""

import sys
from collections.abc import Sequence
from pathlib import Path

import yaml

from benchmarks.peers.peer import STOP_SECONDS, Peer
from benchmarks.peers.service import Service
from supervisor.demo import cleanup
from tests.bed.nodes import LONG_TTL, NodeBed

RESTART = {"window": "100ms", "backoff": ["1s"], "healthy": "100ms"}
"""Each kill counts as a first failure, which is restarted at once."""


class Gpuward(Peer):
    name = "gpuward"

    def __init__(self, folder: Path, services: Sequence[Service]) -> None:
        super().__init__(folder, services)
        self._node: NodeBed | None = None

    @classmethod
    def binary(cls) -> Path:
        return Path(sys.executable)

    def configure(self) -> None:
        self._node = node = NodeBed(self.folder / "n1", f"/{self.folder.parent.name}/{self.folder.name}", ttl=LONG_TTL)
        node.config["watchdog"] = {}
        for service in self.services:
            keys = {"restart": RESTART, "ready_after": "100ms", "stop_timeout": STOP_SECONDS}
            node.add_service(service.name, *service.command, **keys)
        node.after_an_orderly_end()
        self._file.write_text(yaml.safe_dump(node.config))

    @property
    def node(self) -> NodeBed:
        assert self._node is not None, "not started"
        return self._node

    @property
    def _file(self) -> Path:
        return self.folder / "gpuward.yml"

    def command(self) -> list[str]:
        return self._command("run")

    def start(self) -> None:
        super().start()
        self.node.process = self.process

    def stop_command(self, service: str) -> list[str]:
        return self._command("service", "stop", service, "--wait")

    def restart_command(self, service: str) -> list[str]:
        return self._command("service", "restart", service, "--wait")

    def end(self) -> None:
        if self._node is not None:
            self._node.end()
            cleanup.remove_group(self._node.cgroup)
        cleanup.kill_all(self.folder)

    def _command(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "supervisor.entry", *words, "--config", str(self._file)]
