"""A supervisor that stands still for rounds of its watchdog: what it saw before means nothing afterwards."""

import signal
import sys
import time

from supervisor.watchdog.round import OVERSLEPT
from tests.bed.nodes import Make, NodeBed

OPENS = "import os, sys, time; fd = os.open(sys.argv[1], os.O_RDWR); time.sleep(1000)"


def two_services(node: NodeBed) -> None:
    device = str(node.folder / "gpu" / "nvidia0")
    node.add_service("holds", sys.executable, "-I", "-S", "-c", OPENS, device, gpu=0, lock="lifetime", start_grace="5s")
    node.add_service("sleeps", "sleep", "1000")


def test_within_the_ttl_three_missed_rounds_end_nothing_healthy(make_node: Make) -> None:
    """patroni PR 2969 at the scale of a node: same term, same processes, and the rounds go on.

    Beyond the TTL it is tests/integration/test_node.py, test_a_stopped_supervisor_loses_its_services_at_the_switch_….
    """
    node = make_node(ttl=30).after_an_orderly_end()
    node.config["watchdog"] = {"interval": "500ms", "confirm": "100ms"}
    two_services(node)
    before = node.start().until_leading()
    node.signal(signal.SIGSTOP)
    time.sleep(OVERSLEPT + 2)  # the length of the stop is what is tested: three rounds and more
    node.signal(signal.SIGCONT)
    node.until(lambda: "so this round is skipped" in node.output())
    since = node.until_leading()["services"][0]["for_s"]
    node.until(lambda: (node.status() or before)["services"][0]["for_s"] > since + 2)  # four rounds more
    after = node.until_leading()
    assert after["term"]["token"] == before["term"]["token"]
    assert [row["pid"] for row in after["services"]] == [row["pid"] for row in before["services"]]
    assert [row["failures"] for row in after["services"]] == [0, 0]
    assert not any("watchdog: holds" in line for line in node.output().splitlines())
