"""Which service waits for which (`after`): names that nobody has, and circles in which nobody would start. Pure."""

from collections.abc import Iterator, Mapping
from typing import Any


def wrong_after(services: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """(service, what was found, what was expected), from the raw data of `services`; odd values are skipped."""
    waits = {name: _names(service) for name, service in services.items()}
    for name, others in waits.items():
        for other in others:
            if other not in services:
                yield name, ascii(other), "names of services"
        circle = _circle(name, waits)
        if circle and name == min(circle):  # told once
            yield name, " after ".join([*circle, circle[0]]), "an order in which one of them starts first"


def _names(service: Any) -> list[str]:
    found = service.get("after") if isinstance(service, Mapping) else None
    return [name for name in found if isinstance(name, str)] if isinstance(found, list) else []


def _circle(start: str, waits: Mapping[str, list[str]]) -> list[str]:
    """A way from `start` back to itself; empty: there is none."""
    ways = [[start]]
    seen = set()
    while ways:
        way = ways.pop()
        for other in waits.get(way[-1], []):
            if other == start:
                return way
            if other not in seen:
                seen.add(other)
                ways.append([*way, other])
    return []
