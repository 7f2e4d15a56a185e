"""`gpuward run`: makes a node and its HTTP endpoints from a configuration, and lives until a signal."""

import asyncio
import os
import resource
import signal
import sys

from aiohttp import web

from election.clock import BootClock, Clock, boot_time_loop
from election.store import LockStore
from supervisor.api.limit import limited
from supervisor.api.server import make_app
from supervisor.api.unix import API_SOCKET, listen_at
from supervisor.config.schema import Config
from supervisor.gpu.simulated import SimulatedDriver
from supervisor.log import log_to_stderr
from supervisor.node import Node
from supervisor.notify import heartbeat, notify, ready
from supervisor.run_folder import FolderError, RunFolder

CANNOT_START = 1
"""Exit code: folders, address or node name are taken; the reason is on stderr."""
REAL_CLOCK = BootClock()
GRACE = 1.0
"""Seconds for open HTTP requests at the end."""


def main(config: Config, clock: Clock = REAL_CLOCK) -> int:
    """Until told to stop; the exit code. The clock's boot time must be the real one."""
    log_to_stderr()
    _raise_files_limit()
    with asyncio.Runner(loop_factory=boot_time_loop) as runner:
        return runner.run(_live(config, clock))


async def _live(config: Config, clock: Clock) -> int:
    try:
        folder = RunFolder.open(config)
    except FolderError as error:
        print(f"gpuward: {error}", file=sys.stderr)
        return CANNOT_START
    driver = SimulatedDriver(config.gpu.simulated.folder, config.gpu.simulated.count)
    node = Node(config, clock, make_store(config, clock), driver, folder)
    web_runner = web.AppRunner(make_app(node), access_log=None, shutdown_timeout=GRACE)
    await web_runner.setup()
    try:
        listeners = await _listen(config, web_runner)
    except OSError as error:
        print(f"gpuward: {error}", file=sys.stderr)
        await web_runner.cleanup()
        folder.close()
        return CANNOT_START
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _stop, node, number)
    told = asyncio.create_task(_tell_systemd(node))
    try:
        return await node.run()
    finally:
        told.cancel()
        for listener in listeners:
            listener.close()
        await web_runner.cleanup()
        (config.paths.run / API_SOCKET).unlink(missing_ok=True)
        folder.close()


def _stop(node: Node, number: signal.Signals) -> None:
    notify("STOPPING=1")
    node.stop(f"got {number.name}")


async def _tell_systemd(node: Node) -> None:
    """systemd's watchdog of the unit (WatchdogSec, sd_watchdog_enabled(3)): a supervisor that hangs is started anew. A
    part that shows no life counts as a hang, as it does for the lease (rule 4)."""
    ready(f"{node.config.node} is up")
    text = os.environ.get("WATCHDOG_USEC", "")
    interval = int(text) / 2e6 if text.isdecimal() else 0
    if interval == 0 or os.environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return
    while True:
        if node.alive(node.clock.now()):
            heartbeat()
        await asyncio.sleep(interval)


async def _listen(config: Config, web_runner: web.AppRunner) -> list[asyncio.Server]:
    """On TCP and on the unix socket, each with a limit of its own. Raises OSError that says where."""
    loop, server = asyncio.get_running_loop(), web_runner.server
    assert server is not None
    try:
        tcp = await loop.create_server(limited(server), config.api.host, config.api.port)
    except OSError as error:
        raise OSError(f"cannot listen on {config.api.listen}: {error}; see `api.listen`") from error
    try:
        local = listen_at(config.paths.run / API_SOCKET, config.admin_gid)
        return [tcp, await loop.create_unix_server(limited(server), sock=local)]
    except OSError as error:
        tcp.close()
        raise OSError(f"cannot listen on {config.paths.run / API_SOCKET}: {error}") from error


def make_store(config: Config, clock: Clock) -> LockStore:
    """The backend that `election.store` names."""
    if config.election.store == "local":
        from election.stores.local import LocalStore

        return LocalStore(config.election.local.file, clock=clock)
    from election.stores.etcd_http import EtcdStore

    etcd = config.election.etcd
    assert etcd is not None  # the schema has seen to it
    return EtcdStore(etcd.endpoints, clock=clock, access=etcd.access)


def _raise_files_limit() -> None:
    """Without a file descriptor the supervisor sees nothing. Services keep the limit that we were started with."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
