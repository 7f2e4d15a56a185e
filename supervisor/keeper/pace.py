"""The slowest of late: what rule 22 counts as tick and kill time is measured here. Pure: the time is passed in."""

TICKS_NS = 10 * 10**9
"""Span of the ticks: how late a timer is depends on what the machine does just now."""
KILLS_NS = 300 * 10**9
"""Span of the kills: how long they take depends on the processes, and they are rare."""
STOPPED_NS = 2 * 10**9
"""A loop that is later than this was stopped or frozen, which rules 16, 18 and 20 treat; it is no measure of timers."""


class Slowest:
    """The largest of what was added within the last one to two spans."""

    def __init__(self, span_ns: int) -> None:
        self._span_ns = span_ns
        self._began_ns = 0
        self._present = 0
        self._before = 0

    def add(self, value_ns: int, now_ns: int) -> None:
        """One measurement."""
        self._turn_over(now_ns)
        self._present = max(self._present, value_ns)

    def value_s(self, now_ns: int) -> float:
        """Seconds; 0 where nothing was measured."""
        self._turn_over(now_ns)
        return round(max(self._present, self._before) / 1e9, 6)

    def _turn_over(self, now_ns: int) -> None:
        spans = (now_ns - self._began_ns) // self._span_ns
        if spans > 0:
            self._before = self._present if spans == 1 else 0
            self._present = 0
            self._began_ns += spans * self._span_ns
