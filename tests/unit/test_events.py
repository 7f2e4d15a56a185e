"""The events that the status shows."""

from collections import deque
from typing import Any

from supervisor.node import add_event


def test_what_is_told_by_turns_again_and_again_takes_one_row_each() -> None:
    events: deque[dict[str, Any]] = deque(maxlen=200)
    add_event(events, "t0", "registered as a member")
    for second in range(100):
        add_event(events, f"t{second}", f"claiming: nobody has refreshed for {second} s")
        add_event(events, f"t{second}", "claim abandoned: no connection")
    assert list(events) == [
        {"at": "t0", "what": "registered as a member"},
        {"at": "t99", "what": "claiming: nobody has refreshed for 99 s", "times": 100},
        {"at": "t99", "what": "claim abandoned: no connection", "times": 100},
    ]


def test_what_was_told_long_before_stays_where_it_is() -> None:
    events: deque[dict[str, Any]] = deque(maxlen=200)
    for text in ("one", "two", "three", "one"):
        add_event(events, "now", text)
    assert [row["what"] for row in events] == ["one", "two", "three", "one"]
