"""Holding, fencing and ending a term, rule by rule (rules 3-5, 9, 11, 13, 18). Times are seconds, TTL 9."""

from dataclasses import replace

import pytest

from election import events as e
from election import machine
from election.phases import Ending, Fencing, Holding, Left, StandingBy, State
from election.record import LeaderState, SwitchoverRecord, View
from election.store import ErrorClass
from tests.unit.machine_driver import Driver, alarms, deletion, kinds, only, put, view

TERM = e.Term("me", 50, 7, "then")
OURS = view(60, 50, instance="me", lease=7, nonce="n0")


def holding(stage: LeaderState = "active", t0: float = 100.0, *, armed: bool = True) -> Driver:
    """Holds since 95; the last refresh was sent at 100, the next is due at 104.5; a verify is due at 104."""
    phase = Holding(
        TERM, t0, claimed_at=95.0, stage=stage, armed=armed, recorded=True, next_refresh=t0 + 4.5, next_read=t0 + 4.0
    )
    return Driver(State(phase, floor=50))


def claimed() -> Driver:
    """Holds since just now: its claim was sent at 100."""
    return Driver(State(Holding(TERM, 100.0, claimed_at=100.0, next_refresh=100.1, next_read=100.6), floor=50))


def phase_of(d: Driver) -> Holding:
    assert isinstance(d.state.phase, Holding)
    return d.state.phase


def refresh_failed(refresh: e.Refresh, kind: ErrorClass = ErrorClass.TRANSIENT) -> e.RefreshFailed:
    return e.RefreshFailed(refresh.nonce, refresh.t0, kind, "as told")


def assert_fenced(d: Driver, actions: list[e.Action], kill_at: float) -> None:
    assert isinstance(d.state.phase, Fencing)
    assert only(e.EndServices, actions) == e.EndServices(TERM, kill_at, d.state.phase.why)
    assert alarms(actions) == ["fenced"]
    assert not {"End", "Revoke", "Refresh", "Arm"} & set(kinds(actions)), "nothing is passed on before all are gone"


# --- taking over


def test_the_take_over_begins_with_the_first_acknowledged_deadline_and_only_once() -> None:
    """Rule 16: no acknowledgement, no start."""
    d = claimed()
    first = d.at(100.2)
    assert "TakeOver" not in kinds(first)
    assert only(e.TakeOver, d.at(100.3, e.Armed(50, 108.5))).term == TERM
    assert "TakeOver" not in kinds(d.at(100.4, e.Armed(50, 108.5)))


def test_a_deadline_acknowledged_for_another_term_starts_nothing() -> None:
    """Rule 16."""
    d = claimed()
    assert "TakeOver" not in kinds(d.at(100.2, e.Armed(49, 108.5)))
    assert not phase_of(d).armed


def test_a_term_told_to_stand_down_before_its_switch_was_set_starts_nothing() -> None:
    d = claimed()
    d.at(100.15, e.StandDown("as told"))
    assert "TakeOver" not in kinds(d.at(100.2, e.Armed(50, 108.5)))
    assert kinds(d.at(100.3, e.Gone(50)))[-1] == "End"


def test_a_switch_that_cannot_be_set_fences() -> None:
    """Rule 16."""
    d = holding()
    assert d.at(101.0, e.ArmFailed(49, "of another term")) == []
    assert_fenced(d, d.at(101.0, e.ArmFailed(50, "keeper is dead")), kill_at=101.0)


def test_the_first_refresh_follows_the_claim_and_the_stage_is_told_at_once() -> None:
    """The token stands in the record before `/leader` answers."""
    d = claimed()
    assert only(e.Refresh, d.at(100.1)).stage == "taking-over"
    d.at(100.2, e.Refreshed("id1", 100.1))
    assert not machine.leads(d.state, 100.2, d.timing)
    d.at(100.3, e.Armed(50, 108.5))
    assert only(e.Refresh, d.at(100.8, e.TookOver(50))).stage == "active"
    assert machine.leads(d.state, 100.9, d.timing)


def test_a_node_leads_only_while_active_recorded_and_in_time() -> None:
    d = holding()
    assert machine.leads(d.state, 107.49, d.timing)
    assert not machine.leads(d.state, 107.5, d.timing)
    assert machine.authority_until(d.state, d.timing) == 107.5
    d.state = replace(d.state, phase=replace(phase_of(d), recorded=False))
    assert not machine.leads(d.state, 101.0, d.timing)
    for stage in ("taking-over", "standing-down"):
        assert not machine.leads(holding(stage).state, 101.0, d.timing)


def test_a_take_over_that_failed_is_stood_down_in_good_order_and_still_refreshed() -> None:
    """Rule 13."""
    d = holding("taking-over")
    actions = d.at(101.0, e.TakeOverFailed(50, "no GPU"))
    assert only(e.EndServices, actions).kill_at is None
    assert only(e.Refresh, actions).stage == "standing-down"
    d.at(101.1, e.Refreshed("id1", 101.0))
    assert "Refresh" in kinds(d.at(105.5))
    assert "no GPU" in only(e.End, d.at(105.6, e.Gone(50))).because


def test_outcomes_of_another_terms_take_over_mean_nothing() -> None:
    d = holding("taking-over")
    d.at(101.0, e.TookOver(49))
    d.at(101.0, e.TakeOverFailed(49, "late"))
    assert phase_of(d).stage == "taking-over"


def test_a_take_over_that_ends_after_the_stand_down_began_does_not_make_it_active() -> None:
    d = holding("taking-over")
    d.at(101.0, e.StandDown("as told"))
    d.at(101.1, e.TookOver(50))
    d.at(101.1, e.TakeOverFailed(50, "stopped"))
    assert (phase_of(d).stage, phase_of(d).because) == ("standing-down", "as told")


# --- refreshing


def test_a_refresh_moves_the_deadline_from_before_its_send() -> None:
    """Rules 2 and 3."""
    d = holding()
    refresh = only(e.Refresh, d.at(104.5))
    assert (refresh.t0, refresh.stage, refresh.term) == (104.5, "active", TERM)
    actions = d.at(104.9, e.Refreshed(refresh.nonce, refresh.t0))
    assert only(e.Arm, actions).deadline == 104.5 + 8.5
    assert phase_of(d).t0 == 104.5
    assert "Refresh" not in kinds(d.at(108.9))
    assert "Refresh" in kinds(d.at(109.0))


def test_one_refresh_at_a_time() -> None:
    d = holding()
    assert "Refresh" in kinds(d.at(104.5))
    assert "Refresh" not in kinds(d.at(105.5))


@pytest.mark.parametrize("kind", [kind for kind in ErrorClass if kind is not ErrorClass.LOST])
def test_what_is_not_lost_is_retried_until_giving_up(kind: ErrorClass) -> None:
    """Rule 9; consul PR 912, Patroni 3407: one failed renewal ends nothing."""
    d = holding()
    attempts = []
    now = 104.5
    while isinstance(d.state.phase, Holding):
        for action in d.at(now):
            if isinstance(action, e.Refresh):
                attempts.append(action.t0)
                d.at(now + 0.4, refresh_failed(action, kind))
        now += 0.5
    assert attempts == [104.5, 105.0, 105.5, 106.0, 106.5, 107.0]


@pytest.mark.parametrize("kind", [ErrorClass.LOST])
def test_what_is_lost_fences_at_once(kind: ErrorClass) -> None:
    """Rule 9: lease not found, compare failed."""
    d = holding()
    refresh = only(e.Refresh, d.at(104.5))
    assert_fenced(d, d.at(104.6, refresh_failed(refresh, kind)), kill_at=104.6)


def test_a_node_that_is_not_alive_refreshes_nothing_and_gives_up_in_time() -> None:
    """Rule 4; swarmkit 1658."""
    d = holding()
    d.alive = False
    seen: list[str] = []
    for tenth in range(1, 75):
        seen += kinds(d.at(100 + tenth / 10))
    assert "Refresh" not in seen
    assert_fenced(d, d.at(107.5), kill_at=108.0)


def test_a_node_that_is_alive_again_in_time_refreshes_at_once() -> None:
    """Rule 4."""
    d = holding()
    d.alive = False
    assert "Refresh" not in kinds(d.at(106.0))
    d.alive = True
    assert "Refresh" in kinds(d.at(106.5))


def test_giving_up_ends_the_services_by_the_kill_deadline() -> None:
    """The table "Timing": SIGTERM at give-up, killed at t0 + 8."""
    d = holding()
    assert not isinstance(d.state.phase, Fencing)
    assert_fenced(d, d.at(107.5), kill_at=108.0)


def test_giving_up_does_not_wait_for_a_call_to_return() -> None:
    """Kubernetes 65090: a hung API call blocked the exit for ever."""
    d = holding()
    assert "Refresh" in kinds(d.at(104.5))
    assert_fenced(d, d.at(107.5), kill_at=108.0)


@pytest.mark.parametrize(
    "event",
    [
        e.Refreshed("late", 107.2),
        e.Viewed(replace(OURS, leader=view(1, instance="me", nonce="late").leader), 107.4),
        e.Armed(50, 116.0),
        e.TookOver(50),
    ],
    ids=lambda event: type(event).__name__,
)
def test_giving_up_is_final_even_if_good_news_arrive_in_the_same_step(event: e.Event) -> None:
    """Rule 3."""
    d = holding()
    d.state = replace(d.state, phase=replace(phase_of(d), unanswered=(("late", 107.2),), refreshing=True))
    assert_fenced(d, d.at(107.5, event), kill_at=108.0)
    assert d.at(107.6, event) == []
    assert isinstance(d.state.phase, Fencing)


def test_an_answer_to_an_older_attempt_never_moves_the_deadline_back() -> None:
    d = holding()
    assert "Arm" not in kinds(d.at(101.0, e.Refreshed("old", 99.0)))
    assert phase_of(d).t0 == 100.0


# --- an attempt without an answer


def test_our_own_nonce_read_back_confirms_its_attempt_from_that_attempts_t0() -> None:
    """Rule 3."""
    d = holding()
    refresh = only(e.Refresh, d.at(104.5))
    d.at(104.9, refresh_failed(refresh))
    shown = view(61, 50, instance="me", lease=7, nonce=refresh.nonce)
    actions = d.viewed(104.95, shown)
    assert only(e.Arm, actions).deadline == 104.5 + 8.5
    assert phase_of(d).t0 == 104.5


def test_of_several_attempts_without_an_answer_only_the_one_read_back_is_confirmed() -> None:
    """Rule 3."""
    d = holding()
    first = only(e.Refresh, d.at(104.5))
    d.at(104.9, refresh_failed(first))
    second = only(e.Refresh, d.at(105.0))
    d.at(105.4, refresh_failed(second))
    d.viewed(105.45, view(61, 50, instance="me", lease=7, nonce=first.nonce))
    assert phase_of(d).t0 == 104.5
    assert phase_of(d).unanswered == ((second.nonce, 105.0),)


def test_a_verify_extends_nothing() -> None:
    """Rule 5."""
    d = holding()
    d.at(104.0)
    actions = d.viewed(104.1, OURS)
    assert "Arm" not in kinds(actions)
    assert phase_of(d).t0 == 100.0
    assert_fenced(d, d.at(107.5), kill_at=108.0)


def test_a_nonce_that_is_not_of_an_unanswered_attempt_extends_nothing() -> None:
    """Rule 3."""
    d = holding()
    d.viewed(104.1, view(61, 50, instance="me", lease=7, nonce="unheard of"))
    assert phase_of(d).t0 == 100.0


def test_a_refresh_confirmed_by_reading_back_counts_as_on_record() -> None:
    d = claimed()
    refresh = only(e.Refresh, d.at(100.1))
    d.at(100.5, refresh_failed(refresh))
    d.viewed(100.55, view(51, 50, instance="me", lease=7, nonce=refresh.nonce))
    assert phase_of(d).recorded


# --- verifying


def test_between_refreshes_the_holder_verifies_one_read_at_a_time() -> None:
    """Rule 5."""
    d = holding()
    assert kinds(d.at(103.99)) == []
    assert kinds(d.at(104.0)) == ["Read"]
    assert kinds(d.at(104.3)) == []
    d.viewed(104.4, OURS)
    assert "Read" in kinds(d.at(104.9)) + kinds(d.at(104.91))


@pytest.mark.parametrize(
    "shown",
    [
        view(0, 50, instance="me"),
        view(0, 0),
        view(60, 0, instance="me", lease=7),
        view(60, 55, instance="other", lease=8),
        view(60, 55, instance="me", lease=7),
        view(60, 50, instance="me", lease=0),
        view(60, 50, instance="other", lease=7),
        replace(OURS, leader=None, damage=("damaged",)),
    ],
    ids=["key gone", "both gone", "term gone", "another's", "term rewritten", "detached", "overwritten", "damaged"],
)
def test_a_key_that_is_gone_or_not_ours_fences_at_once_without_grace(shown: View) -> None:
    """Rules 5 and 9."""
    d = holding()
    d.at(104.0)
    assert_fenced(d, d.viewed(104.1, shown), kill_at=104.1)


def test_an_answer_to_a_read_sent_before_the_claim_changes_nothing() -> None:
    d = claimed()
    before = d.state
    assert d.viewed(100.05, view(3, 2), sent_at=99.99) == []
    assert d.state.phase == before.phase


def test_a_read_that_failed_is_tried_again_and_fences_nothing() -> None:
    """Rule 9."""
    d = holding()
    d.at(104.0)
    d.at(104.2, e.ReadFailed("no answer", 104.0))
    d.at(104.5)
    assert "Read" in kinds(d.at(104.71))


@pytest.mark.parametrize(
    "heard",
    [
        deletion(61, previous=60),
        put(61, lease=8, previous=60),
        put(61, lease=0, previous=60),
        put(61, is_leader=False, lease=0, previous=50),
        deletion(61, previous=50, is_leader=False),
        e.Gap(),
    ],
    ids=["key deleted", "key of another", "key detached", "term written", "term deleted", "gap"],
)
def test_what_the_watch_tells_of_our_keys_is_verified_at_once(heard: e.Event) -> None:
    """Rule 5: a watch is a hint, the read decides."""
    d = holding()
    assert kinds(d.at(101.0, heard)) == ["Read"]
    assert isinstance(d.state.phase, Holding)


@pytest.mark.parametrize("heard", [put(61, lease=7, previous=60), put(50, is_leader=False, lease=0, previous=2)])
def test_our_own_writes_heard_cause_no_read(heard: e.Event) -> None:
    assert holding().at(101.0, heard) == []


def test_what_is_heard_while_a_verify_is_under_way_is_verified_again() -> None:
    """Rule 5: that answer may be older."""
    d = holding()
    assert kinds(d.at(104.0)) == ["Read"]
    assert kinds(d.at(104.1, deletion(61, previous=60))) == []
    assert kinds(d.viewed(104.2, OURS)) == ["Read"]


# --- rule 18


def test_after_a_clock_step_the_holder_verifies_at_once_and_goes_on() -> None:
    """Rule 18; Patroni PR 2969."""
    d = holding()
    assert "Read" in kinds(d.at(101.0, e.Suspect("the wall clock stepped")))
    d.viewed(101.2, OURS, sent_at=101.0)
    assert "EndServices" not in kinds(d.at(102.1))
    assert isinstance(d.state.phase, Holding)


def test_after_a_clock_step_without_a_verify_in_time_the_holder_fences() -> None:
    """Rule 18: a ninth of the TTL."""
    d = holding()
    d.at(101.0, e.Suspect("the wall clock stepped"))
    d.at(101.4, e.ReadFailed("no answer", 101.0))
    assert "EndServices" not in kinds(d.at(101.99))
    assert_fenced(d, d.at(102.0), kill_at=102.0)


def test_only_a_read_sent_after_the_clock_step_verifies() -> None:
    """Rule 18."""
    d = holding()
    d.at(104.0)
    assert "Read" not in kinds(d.at(104.1, e.Suspect("late")))
    assert "Read" in kinds(d.viewed(104.2, OURS, sent_at=104.0))
    assert_fenced(d, d.at(105.1), kill_at=105.1)


def test_a_refresh_does_not_stand_in_for_the_verify() -> None:
    """Rule 18: its answer may have lain there since before the step."""
    d = holding()
    refresh = only(e.Refresh, d.at(104.5))
    d.at(104.6, e.Suspect("late"))
    d.at(104.7, e.Refreshed(refresh.nonce, refresh.t0))
    assert_fenced(d, d.at(105.6), kill_at=105.6)


def test_a_second_clock_step_does_not_lengthen_the_time_to_verify() -> None:
    """Rule 18."""
    d = holding()
    d.at(101.0, e.Suspect("late"))
    d.at(101.9, e.Suspect("late again"))
    assert_fenced(d, d.at(102.0), kill_at=102.0)


def test_the_time_to_verify_ends_with_the_time_left_to_give_up() -> None:
    """Rule 18."""
    d = holding()
    d.alive = False
    d.at(107.0, e.Suspect("late"))
    assert isinstance(d.state.phase, Holding)
    assert_fenced(d, d.at(107.5), kill_at=108.0)


# --- standing down, fencing, ending


def test_a_stand_down_is_refreshed_until_all_are_gone_then_recorded_then_the_lease_revoked() -> None:
    """Rule 11; Kubernetes PR 139991: stop, verify, then release."""
    d = holding()
    actions = d.at(101.0, e.StandDown("as told"))
    assert only(e.EndServices, actions) == e.EndServices(TERM, None, "as told")
    assert only(e.Refresh, actions).stage == "standing-down"
    assert not {"End", "Revoke"} & set(kinds(actions))
    d.at(101.1, e.Refreshed("id1", 101.0))
    assert "Refresh" in kinds(d.at(105.5)), "the wait may be long"
    assert kinds(d.at(105.6, e.Gone(50))) == ["End"]
    assert isinstance(d.state.phase, Ending)
    assert only(e.Revoke, d.at(105.7, e.Ended(50, overtaken=False))).lease == 7
    assert isinstance(d.state.phase, StandingBy)
    assert "me" in d.state.gone


def test_a_second_request_to_stand_down_changes_nothing() -> None:
    d = holding()
    d.at(101.0, e.StandDown("first"))
    assert "EndServices" not in kinds(d.at(101.1, e.StandDown("second")))
    assert phase_of(d).because == "first"


def test_a_stand_down_that_takes_too_long_without_a_store_is_cut_short() -> None:
    """Rule 11: the kill deadline cuts every stop_timeout."""
    d = holding()
    d.at(101.0, e.StandDown("as told"))
    assert_fenced(d, d.at(107.5), kill_at=108.0)


def test_services_that_are_gone_by_themselves_do_not_end_a_term_that_stands() -> None:
    d = holding()
    assert "End" not in kinds(d.at(101.0, e.Gone(50)))
    assert isinstance(d.state.phase, Holding)


@pytest.mark.parametrize("stage", ["taking-over", "active", "standing-down"])
def test_a_term_that_cannot_be_kept_safe_is_fenced_at_once_in_every_stage(stage: LeaderState) -> None:
    """Rule 16."""
    d = holding(stage)
    assert_fenced(d, d.at(101.0, e.FenceNow("keeper is silent")), kill_at=101.0)


def test_a_fenced_term_is_ended_only_when_all_of_it_is_gone() -> None:
    """Rule 11; Consul 9788."""
    d = holding()
    d.at(107.5)
    for event in (e.Tick(), e.Refreshed("n", 107.4), e.Viewed(OURS, 107.6), e.Gone(49), e.Armed(50, 116.0)):
        assert d.at(108.0, event) == []
    assert only(e.End, d.at(108.1, e.Gone(50))).term == TERM


@pytest.mark.parametrize("fenced", [True, False])
def test_an_end_that_cannot_be_proven_is_not_recorded_and_lets_nobody_in_early(fenced: bool) -> None:
    """Rules 8 and 11: this node, too, waits the term out."""
    d = holding()
    d.at(101.0, e.FenceNow("keeper is gone") if fenced else e.StandDown("as told"))
    actions = d.at(102.0, e.Gone(50, proven=False))
    assert not {"End", "Revoke"} & set(kinds(actions))
    assert isinstance(d.state.phase, StandingBy)
    d.viewed(102.1, OURS)
    assert d.claims_from(111.1)


def test_an_orderly_end_that_failed_is_tried_again() -> None:
    """kube-vip 1651."""
    d = holding()
    d.at(107.5)
    d.at(108.0, e.Gone(50))
    d.at(108.4, e.EndFailed(50, "no answer"))
    assert kinds(d.at(108.8)) == []
    assert kinds(d.at(108.9)) == ["End"]
    assert kinds(d.at(109.5)) == [], "one at a time"


def test_an_orderly_end_that_cannot_be_recorded_for_a_ttl_is_left_and_the_node_stands_by() -> None:
    """kube-vip 1651: always campaigns again."""
    d = holding()
    d.at(107.5)
    d.at(108.0, e.Gone(50))
    assert only(e.Revoke, d.at(117.0, e.EndFailed(50, "no answer"))).lease == 7
    assert isinstance(d.state.phase, StandingBy)
    assert kinds(d.at(117.0)) == ["Read"]


def test_an_end_that_was_overtaken_is_as_good() -> None:
    """Rule 11: another term stands already."""
    d = holding()
    d.at(107.5)
    d.at(108.0, e.Gone(50))
    assert "Revoke" in kinds(d.at(108.1, e.Ended(50, overtaken=True)))
    assert isinstance(d.state.phase, StandingBy)


def test_the_end_of_another_term_means_nothing() -> None:
    d = holding()
    d.at(107.5)
    d.at(108.0, e.Gone(50))
    assert d.at(108.1, e.Ended(49, overtaken=False)) == []
    assert d.at(118.1, e.EndFailed(49, "")) == []
    assert isinstance(d.state.phase, Ending)


def test_after_its_own_end_a_node_may_claim_again_at_once() -> None:
    """Rules 8a and 8c."""
    d = holding()
    d.at(107.5)
    d.at(108.0, e.Gone(50))
    d.at(117.0, e.EndFailed(50, "no answer"))
    assert "Claim" in kinds(d.viewed(117.1, OURS)), "its own last term, which it knows to be gone"


def test_a_node_that_leaves_ends_its_term_in_good_order_and_claims_no_more() -> None:
    d = holding()
    d.at(101.0, e.StandDown("stopped", leave=True))
    assert kinds(d.at(102.0, e.Gone(50)))[-1] == "End"
    assert "Revoke" in kinds(d.at(102.1, e.Ended(50, overtaken=False)))
    assert isinstance(d.state.phase, Left)
    assert d.viewed(103.0, view(0, 61, ended="now")) == [e.NoteToken(61)]


def test_a_node_told_to_leave_while_it_is_fenced_leaves_afterwards() -> None:
    d = holding()
    d.at(107.5)
    d.at(107.6, e.StandDown("stopped", leave=True))
    d.at(108.0, e.Gone(50))
    d.at(108.1, e.Ended(50, overtaken=False))
    assert isinstance(d.state.phase, Left)


@pytest.mark.parametrize(
    "event",
    [
        e.Tick(),
        e.Claimed(e.Term("late", 55, 9), 100.5),
        e.ClaimFailed("late", 9, 100.5, "ambiguous", ""),
        e.Armed(49, 110.0),
        e.ArmFailed(49, ""),
        e.TookOver(50),
        e.TakeOverFailed(50, "late"),
        e.Gone(49),
        e.Ended(50, overtaken=True),
        e.EndFailed(50, ""),
    ],
    ids=lambda event: type(event).__name__,
)
def test_events_that_mean_nothing_to_an_active_holder_change_nothing(event: e.Event) -> None:
    d = holding()
    before = d.state
    assert d.at(101.0, event) == []
    assert d.state == before


# --- a switchover (rule 12)


READY, UNFIT, SILENT = e.Target(True, ""), e.Target(False, "no GPU"), e.Target(False, "")


def asks(target: e.Target | None, instance: str = "me", mod: int = 61, sent_at: float = 101.0) -> e.Viewed:
    request = SwitchoverRecord(target="there", instance=instance, hold_back_s=10.0, asked="", on="n9")
    return e.Viewed(replace(OURS, switchover=request, switchover_mod=mod), sent_at, target)


def test_a_holder_that_hears_of_an_operators_word_reads_it_at_once() -> None:
    assert "Read" in kinds(holding().at(101.0, e.Changed()))


def test_the_term_ends_in_good_order_for_a_target_that_is_ready() -> None:
    d = holding()
    actions = d.at(101.0, asks(READY))
    assert phase_of(d).stage == "standing-down"
    assert only(e.EndServices, actions).kill_at is None
    assert "there" in only(e.EndServices, actions).why


@pytest.mark.parametrize(
    ("stage", "event"),
    [("taking-over", asks(READY)), ("active", asks(READY, instance="older")), ("active", asks(None))],
    ids=["not active", "another term", "target not looked at"],
)
def test_a_request_that_does_not_fit_the_term_changes_nothing(stage: LeaderState, event: e.Viewed) -> None:
    d = holding(stage)
    assert not {"EndServices", "RefuseSwitchover"} & set(kinds(d.at(101.0, event)))
    assert phase_of(d).stage == stage


def test_a_target_that_is_not_fit_is_refused_and_the_term_goes_on() -> None:
    d = holding()
    refused = only(e.RefuseSwitchover, d.at(101.0, asks(UNFIT)))
    assert (refused.switchover_mod, "no GPU" in refused.why) == (61, True)
    assert phase_of(d).stage == "active"


def test_a_target_that_does_not_answer_is_refused_after_a_while_and_each_request_has_its_own_while() -> None:
    d = holding()
    assert "RefuseSwitchover" not in kinds(d.at(101.0, asks(SILENT)))
    assert "RefuseSwitchover" not in kinds(d.at(103.0, asks(SILENT, mod=62)))
    assert "RefuseSwitchover" not in kinds(d.at(107.0, asks(SILENT, mod=62)))
    d.at(107.1, e.Refreshed("n", 107.0))
    assert "RefuseSwitchover" in kinds(d.at(108.0, asks(SILENT, mod=62)))


# --- a store that went back (rule 21)


def test_a_holder_fences_at_once_when_the_store_goes_back() -> None:
    d = holding()
    d.viewed(101.0, replace(OURS, revision=90))
    actions = d.viewed(102.0, replace(OURS, revision=89))
    assert isinstance(d.state.phase, Fencing)
    assert alarms(actions) == ["history-went-back", "fenced"]
    assert only(e.EndServices, actions).kill_at == 102.0
