"""The table of a service's states."""

import pytest

from supervisor.service.states import ALIVE, TRANSITIONS, IllegalTransitionError, State, step


def test_every_edge_tells_a_sentence() -> None:
    assert all(sentence.strip() for sentence in TRANSITIONS.values())
    assert step(State.STARTING, State.RUNNING) == "ready"


@pytest.mark.parametrize("present", list(State))
@pytest.mark.parametrize("new", list(State))
def test_what_is_not_in_the_table_is_refused(present: State, new: State) -> None:
    if (present, new) in TRANSITIONS:
        assert step(present, new) == TRANSITIONS[present, new]
    else:
        with pytest.raises(IllegalTransitionError, match="not in the table"):
            step(present, new)


def test_every_state_can_be_reached_and_left() -> None:
    reached, frontier = {State.STOPPED}, [State.STOPPED]
    while frontier:
        here = frontier.pop()
        for start, end in TRANSITIONS:
            if start is here and end not in reached:
                reached.add(end)
                frontier.append(end)
    assert reached == set(State)
    assert {start for start, _ in TRANSITIONS} == set(State)


def test_a_process_never_ends_without_its_remains_being_ended() -> None:
    """Supervisor 1101: grandchildren outlive their parent. So every way out of life leads through `stopping`."""
    outs = {end for start, end in TRANSITIONS if start in ALIVE and end not in ALIVE}
    assert outs == {State.STOPPING, State.WAITING_LOCK}
    assert [start for start, end in TRANSITIONS if end is State.WAITING_LOCK and start in ALIVE] == [State.STARTING]


def test_a_quarantined_service_never_starts_by_itself() -> None:
    """unsloth 3331: no loop on a process that SIGKILL does not end."""
    assert {end for start, end in TRANSITIONS if start is State.QUARANTINED} == {State.STOPPED}


def test_degraded_is_left_only_by_an_operator() -> None:
    ways = {sentence for (start, _), sentence in TRANSITIONS.items() if start is State.DEGRADED}
    assert all("operator" in sentence for sentence in ways)
