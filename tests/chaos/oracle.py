"""The judge of a chaos run: intervals in which service processes of a node could run, seen from outside. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tests.chaos.faults import Excuse


@dataclass(frozen=True)
class Interval:
    """Service processes of `node` under `token` were seen from `first` to `last` (boot-time seconds)."""

    node: str
    token: int
    first: float
    last: float


def intervals(observed: dict[str, Any]) -> list[Interval]:
    """Of the observer's result."""
    return [Interval(row["node"], row["token"], row["first"], row["last"]) for row in observed["intervals"]]


def without_frozen(found: Iterable[Interval], excuses: Iterable[Excuse]) -> list[Interval]:
    """A frozen process does nothing: its intervals have a hole there."""
    left = list(found)
    for frozen in (excuse for excuse in excuses if excuse.kind == "frozen"):
        left = [piece for interval in left for piece in _outside(interval, frozen)]
    return left


def _outside(interval: Interval, frozen: Excuse) -> list[Interval]:
    if interval.node != frozen.node or interval.last <= frozen.begin or interval.first >= frozen.end:
        return [interval]
    before = Interval(interval.node, interval.token, interval.first, frozen.begin)
    after = Interval(interval.node, interval.token, frozen.end, interval.last)
    return [piece for piece in (before, after) if piece.last > piece.first]


def overlaps(found: Sequence[Interval], excuses: Sequence[Excuse]) -> dict[str, float]:
    """Seconds for which two nodes had processes that could run, by the exception that excuses it ("": none does)."""
    total: dict[str, float] = {}
    ordered = sorted(without_frozen(found, excuses), key=lambda interval: interval.first)
    for number, one in enumerate(ordered):
        for other in ordered[number + 1 :]:
            begin, end = max(one.first, other.first), min(one.last, other.last)
            if one.node != other.node and begin < end:
                kind = next((e.kind for e in excuses if _excuses(e, one, other, begin, end)), "")
                total[kind] = total.get(kind, 0.0) + end - begin
    return total


def _excuses(excuse: Excuse, one: Interval, other: Interval, begin: float, end: float) -> bool:
    return excuse.node in (one.node, other.node) and excuse.begin <= begin and end <= excuse.end


def out_of_bounds(total: dict[str, float], excuses: Sequence[Excuse]) -> list[str]:
    """An exception excuses no more than its own time."""
    found = []
    for kind, seconds in total.items():
        longest = sum(excuse.end - excuse.begin for excuse in excuses if excuse.kind == kind)
        if kind and seconds > longest:
            found.append(f"{kind}: {seconds:.3f} s of overlap in {longest:.3f} s")
    return found


def moved(found: Iterable[Interval], begun: Iterable[float]) -> list[float | None]:
    """For each fault: seconds until the first process of another node than the one that had some then."""
    ordered = sorted(found, key=lambda interval: interval.first)
    took: list[float | None] = []
    for at in begun:
        before = [interval.node for interval in ordered if interval.first <= at]
        later = (i.first - at for i in ordered if i.first > at and before and i.node != before[-1])
        took.append(next((round(seconds, 3) for seconds in later), None))
    return took


def tokens_rise(found: Iterable[Interval]) -> bool:
    """A later first process never has a lower token than an earlier one, and no two nodes share one."""
    ordered = sorted(found, key=lambda interval: interval.first)
    owners: dict[int, str] = {}
    for interval in ordered:
        if owners.setdefault(interval.token, interval.node) != interval.node:
            return False
    tokens = [interval.token for interval in ordered]
    return tokens == sorted(tokens)
