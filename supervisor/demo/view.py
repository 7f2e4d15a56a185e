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
MOST_EVENTS, FEWEST_EVENTS = 10, 6
BESIDE_EVENTS = 13
"""Lines of a picture that are not events: title, table of three nodes, up to three lines of services."""
WIDE = 100
"""Columns from which `processes` and `turns` have room beside `why`."""
LAG = 1.0
"""Seconds that an event may come late: terms are read from the store, processes from what the observer wrote."""


class Plain:
    """Events as lines, in the order in which they happened: while more of them can come, `LAG` later."""

    def __init__(self, stream: TextIO) -> None:
        self.events: list[Event] = []
        self._stream = stream
        self._start = boot_time()
        self._held: list[Event] = []
        self._live = False

    def notice(self, event: Event) -> None:
        """Keep it and show it."""
        self.events.append(event)
        self._held.append(event)
        if not self._live:
            self.show_until(event.at)

    def show_until(self, moment: float) -> None:
        """Print what happened until then (boot time) and has not been printed."""
        self._held.sort(key=lambda event: event.at)
        while self._held and self._held[0].at <= moment:
            print(self.line(self._held.pop(0)), file=self._stream, flush=True)

    def line(self, event: Event) -> str:
        """Seconds since the demo began, and what happened."""
        return f"{event.at - self._start:8.2f} s  {event.what}"

    def untold(self) -> list[str]:
        """Lines of the timeline that are not on the screen yet."""
        return []

    @contextlib.asynccontextmanager
    async def live(self, _watcher: Watcher) -> AsyncIterator[None]:
        """While it is entered, the state is shown."""
        self._live = True
        showing = asyncio.create_task(self._show())
        try:
            yield
        finally:
            self._live = False
            showing.cancel()
            await asyncio.gather(showing, return_exceptions=True)
            self.show_until(float("inf"))

    async def _show(self) -> None:
        while True:
            self.show_until(boot_time() - LAG)
            await asyncio.sleep(PERIOD)


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
        count = max(FEWEST_EVENTS, min(MOST_EVENTS, self._console.height - BESIDE_EVENTS))
        last = sorted(self.events, key=lambda event: event.at)[-count:]
        lines = [Text(self.line(event), no_wrap=True, overflow="ellipsis") for event in last]
        title = Text(self._title, style="bold", no_wrap=True, overflow="ellipsis")
        return Group(title, _nodes(watcher, wide=self._console.width >= WIDE), _services(watcher), *lines)


def for_output(fmt: str, title: str) -> Plain:
    """A table where a person watches, lines where a script reads."""
    console = Console()
    if fmt == "json":
        return Plain(sys.stderr)
    return Terminal(console, title) if console.is_terminal else Plain(sys.stdout)


def _nodes(watcher: Watcher, *, wide: bool) -> Table:
    table = Table("node", "state", "token", "lease left", "services", *(("processes", "turns") if wide else ()))
    for column in table.columns:
        column.no_wrap = True
    table.add_column("why")  # may shrink, unlike the others; its text stays one line all the same
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
            *(("yes" if name in watcher.observed else "", str(node.turns())) if wide else ()),
            Text(str((status or {}).get("why") or ""), no_wrap=True, overflow="ellipsis"),
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
