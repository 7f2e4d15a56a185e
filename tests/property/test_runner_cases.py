"""Cases that the life of a node under any order of events has shown to be worth a test of their own."""

import asyncio
from collections.abc import Iterator

import pytest

from supervisor.service.states import State
from tests.property.test_runner_property import NodeLife


@pytest.fixture
def node() -> Iterator[NodeLife]:
    life = NodeLife()
    life.time_passes(1.0)
    yield life
    life._die()
    life.patch.undo()
    life.loop.close()


def end(node: NodeLife, service: str, **how: object) -> None:
    number = [process.service for process in node.there].index(service)
    node.a_process_ends(number, **({"status": 0, "children": 0, "listed": False} | how))


def back(node: NodeLife) -> None:
    """As the rule, without what it forgives."""
    node._die()
    node.services = node._supervisor()
    node.run(node.services.remember())
    found, held = node.machine.hello()
    node.run(node.services.adopt(node.machine.token, found, held, deadline=node.loop.time() + 5), 0.2)


def test_a_service_that_died_while_the_supervisor_was_away_waits_for_the_driver(node: NodeLife) -> None:
    """sglang 39545, VisEdit 5."""
    node._die()
    end(node, "first", listed=True)
    back(node)
    assert node.machine.violations == []


def test_a_service_that_failed_while_the_supervisor_was_away_has_failed(node: NodeLife) -> None:
    node._die()
    end(node, "plain", status=1 << 8)
    back(node)
    assert node.services.runners["plain"].account.failures == 1


def test_the_reason_of_a_service_that_is_never_ready_does_not_grow(node: NodeLife) -> None:
    node.run(asyncio.sleep(30))
    assert max(map(len, node.told)) < 300
    assert not any(sentence.count("not ready within") > 1 for sentence in node.told), node.told[-1]


def test_a_start_without_an_answer_is_one_failure(node: NodeLife) -> None:
    """What it may have started is ended first, so the restart at once finds nothing in its way."""
    node.machine.next_start = "silent and done"
    node.run(node.services.restart("plain", "asked for by an operator", kill=False, counts=False))
    node.run(asyncio.sleep(30))
    assert not [text for text in node.told if "did not start: running" in text]
    assert node.states["plain"] is State.RUNNING
