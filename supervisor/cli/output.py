"""How commands print: rich on a terminal, plain and wide when piped."""

import sys

from rich.console import Console

PIPED_WIDTH = 200
"""Characters. Nobody wants a table cut to 80 in a file or behind grep."""


def console() -> Console:
    """For stdout. Markup is off: what is printed comes from configurations and other nodes."""
    width = None if sys.stdout.isatty() else PIPED_WIDTH
    return Console(file=sys.stdout, markup=False, highlight=False, emoji=False, width=width)


def plain(value: object) -> str:
    """A text without control characters, which could move the cursor or recolour the terminal; – for nothing."""
    return "–" if value is None else "".join(char if char.isprintable() else "�" for char in str(value))


def span(seconds: object) -> str:
    """A duration for people: 340 ms, 12 s, 5 min 3 s, 2 h 10 min, 3 d 4 h."""
    if not isinstance(seconds, int | float) or isinstance(seconds, bool):
        return "–"
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    whole = int(seconds)
    for large, small, size, unit in (("d", "h", 86400, 3600), ("h", "min", 3600, 60), ("min", "s", 60, 1)):
        if whole >= size:
            rest = whole % size // unit
            return f"{whole // size} {large}" + (f" {rest} {small}" if rest else "")
    return f"{whole} s"
