"""The demo on a terminal: a live table. Elsewhere: a plain line per event."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from election.clock import boot_time
from supervisor.demo.cluster import SERVICES, DemoCluster
from supervisor.demo.watch import Event, Status, Watcher, is_active, running_services

PERIOD = 0.25
"""Seconds between two pictures."""
LAST_EVENTS = 10


class Plain:
    """Events as lines, as they happen."""

    def __init__(self, stream: TextIO) -> None:
        self.events: list[Event] = []
        self._stream = stream
        self._start = boot_time()

    def notice(self, event: Event) -> None:
        """Keep it and show it."""
        self.events.append(event)
        print(self.line(event), file=self._stream, flush=True)

    def line(self, event: Event) -> str:
        """Seconds since the demo began, and what happened."""
        return f"{event.at - self._start:8.2f} s  {event.what}"

    def untold(self) -> list[str]:
        """Lines of the timeline that are not on the screen yet."""
        return []

    @contextlib.asynccontextmanager
    async def live(self, _watcher: Watcher) -> AsyncIterator[None]:
        """While it is entered, the state is shown."""
        yield


class Terminal(Plain):
    """A table that is drawn again four times a second."""

    def __init__(self, console: Console, title: str) -> None:
        super().__init__(sys.stdout)
        self._console = console
        self._title = title

    def notice(self, event: Event) -> None:
        """Keep it: the table shows the last ones."""
        self.events.append(event)

    def untold(self) -> list[str]:
        """All of them: the table goes away at the end."""
        return [self.line(event) for event in sorted(self.events, key=lambda event: event.at)]

    @contextlib.asynccontextmanager
    async def live(self, watcher: Watcher) -> AsyncIterator[None]:
        with Live(console=self._console, auto_refresh=False, transient=True) as screen:
            drawing = asyncio.create_task(self._draw(screen, watcher))
            try:
                yield
            finally:
                drawing.cancel()
                await asyncio.gather(drawing, return_exceptions=True)

    async def _draw(self, screen: Live, watcher: Watcher) -> None:
        while True:
            screen.update(self._picture(watcher), refresh=True)
            await asyncio.sleep(PERIOD)

    def _picture(self, watcher: Watcher) -> RenderableType:
        last = sorted(self.events, key=lambda event: event.at)[-LAST_EVENTS:]
        lines = [Text(self.line(event)) for event in last]
        return Group(Text(self._title, style="bold"), _nodes(watcher), _services(watcher), *lines)


def for_output(fmt: str, title: str) -> Plain:
    """A table where a person watches, lines where a script reads."""
    console = Console()
    if fmt == "json":
        return Plain(sys.stderr)
    return Terminal(console, title) if console.is_terminal else Plain(sys.stdout)


def _nodes(watcher: Watcher) -> Table:
    table = Table("node", "state", "token", "lease left", "services", "processes", "turns", "why")
    for name, node in watcher.cluster.nodes.items():
        status = watcher.statuses[name]
        term = (status or {}).get("term") or {}
        left = term.get("lease_left_s")
        table.add_row(
            name,
            _state(status, node.running),
            str(term.get("token") or ""),
            "" if left is None else f"{left:.1f} s",
            f"{running_services(status)}/{SERVICES}" if status else "",
            "yes" if name in watcher.observed else "",
            str(node.turns()),
            str((status or {}).get("why") or "")[:60],
            style="green" if is_active(status) else None,
        )
    return table


def _services(watcher: Watcher) -> Text:
    holder = watcher.active()
    status = watcher.statuses[holder] if holder else None
    turns = _turns_by_service(watcher.cluster, holder)
    shown = [
        f"{service['name']} {service['state']} ({turns.get(service['name'], 0)})"
        for service in (status or {}).get("services", ())
    ]
    return Text("  ".join(shown) or "no node is active", style="dim")


def _turns_by_service(cluster: DemoCluster, holder: str | None) -> dict[str, int]:
    counts: dict[str, int] = {}
    if holder:
        with contextlib.suppress(FileNotFoundError):
            for name in cluster.nodes[holder].turns_file.read_text().split():
                counts[name] = counts.get(name, 0) + 1
    return counts


def _state(status: Status | None, running: bool) -> str:
    if status is None:
        return "no answer" if running else "down"
    return str(status.get("state") or status.get("role") or "?")
