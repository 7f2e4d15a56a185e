"""`gpuward run`: makes a node and its HTTP endpoints from a configuration, and lives until a signal."""

import asyncio
import logging
import signal
import sys

import structlog
from aiohttp import web

from election.clock import BootClock, Clock, boot_time_loop
from election.store import LockStore
from supervisor.api.server import make_app
from supervisor.api.unix import API_SOCKET, listen_at
from supervisor.config.schema import Config
from supervisor.gpu.simulated import SimulatedDriver
from supervisor.node import Node
from supervisor.run_folder import FolderError, RunFolder

log = structlog.get_logger()

CANNOT_START = 1
"""Exit code: folders, address or node name are taken; the reason is on stderr."""
GRACE = 1.0
"""Seconds for open HTTP requests at the end."""


def main(config: Config) -> int:
    """Until told to stop; the exit code."""
    _log_to_stderr()
    with asyncio.Runner(loop_factory=boot_time_loop) as runner:
        return runner.run(_live(config))


async def _live(config: Config) -> int:
    try:
        folder = RunFolder.open(config)
    except FolderError as error:
        print(f"gpuward: {error}", file=sys.stderr)
        return CANNOT_START
    clock = BootClock()
    driver = SimulatedDriver(config.gpu.simulated.folder, config.gpu.simulated.count)
    node = Node(config, clock, make_store(config, clock), driver, folder)
    web_runner = web.AppRunner(make_app(node), access_log=None, shutdown_timeout=GRACE)
    await web_runner.setup()
    try:
        await web.TCPSite(web_runner, config.api.host, config.api.port).start()
    except OSError as error:
        print(f"gpuward: cannot listen on {config.api.listen}: {error}; see `api.listen`", file=sys.stderr)
        return CANNOT_START
    api_socket = config.paths.run / API_SOCKET
    try:
        await web.SockSite(web_runner, listen_at(api_socket, config.admin_gid)).start()
    except OSError as error:
        print(f"gpuward: cannot listen on {api_socket}: {error}", file=sys.stderr)
        await web_runner.cleanup()
        return CANNOT_START
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, node.stop, f"got {number.name}")
    try:
        return await node.run()
    finally:
        await web_runner.cleanup()
        api_socket.unlink(missing_ok=True)
        folder.close()


def make_store(config: Config, clock: Clock) -> LockStore:
    """The backend that `election.store` names."""
    if config.election.store == "local":
        from election.stores.local import LocalStore

        return LocalStore(config.election.local.file, clock=clock)
    from election.stores.etcd_http import EtcdStore

    assert config.election.etcd is not None  # the schema has seen to it
    return EtcdStore(config.election.etcd.endpoints, clock=clock)


def _log_to_stderr() -> None:
    """Lines for people on a terminal, JSON otherwise."""
    people = sys.stderr.isatty()
    renderer = structlog.dev.ConsoleRenderer() if people else structlog.processors.JSONRenderer()
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
