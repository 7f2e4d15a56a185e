"""Standing by and claiming, rule by rule (rules 6-8, 12, 19, 21). Times are seconds, TTL 9."""

from dataclasses import replace
from typing import Any, Literal

import pytest

from election import events as e
from election.phases import HEARD_KEPT, Claiming, Ending, Holding, Left, StandingBy, State
from election.record import Mark, SettingsRecord, SwitchoverRecord, View
from tests.unit.machine_driver import Driver, alarms, deletion, kinds, only, put, view

Outcome = Literal["refused", "not sent", "ambiguous"]


def standing_by(leader_mod: int = 3, term_mod: int = 2) -> Driver:
    """It has seen these two versions at 100."""
    d = Driver()
    d.viewed(100.0, view(leader_mod, term_mod))
    return d


def claiming() -> tuple[Driver, e.Claim]:
    """Its claim is sent at 109, the wait being over."""
    d = standing_by()
    return d, only(e.Claim, d.at(109.0))


def ours(claim: e.Claim, token: int = 20, lease: int = 7) -> e.Term:
    return e.Term(claim.instance, token, lease, "then")


def failed(claim: e.Claim, outcome: Outcome, lease: int = 7, t0: float = 109.0) -> e.ClaimFailed:
    return e.ClaimFailed(claim.instance, lease, t0, outcome, "as told")


# --- 8a


def test_an_orderly_end_lets_in_at_once() -> None:
    """Rule 8a."""
    claim = only(e.Claim, Driver().viewed(100.0, view(0, 5, ended="now")))
    assert claim.seen == (0, 5, 0, 0)
    assert "8a" in claim.why


def test_an_ended_term_beside_a_leader_key_is_no_orderly_end() -> None:
    """Rule 8a."""
    d = Driver()
    assert "Claim" not in kinds(d.viewed(100.0, view(6, 5, ended="now")))
    assert d.claims_from(109.0)


def test_a_term_that_is_not_marked_ended_is_no_orderly_end() -> None:
    """Rule 8a."""
    d = Driver()
    assert "Claim" not in kinds(d.viewed(100.0, view(0, 5)))
    assert d.claims_from(109.0)


def test_an_absent_term_is_no_end() -> None:
    """Rule 8a: somebody may have deleted everything below the prefix."""
    d = Driver()
    assert "Claim" not in kinds(d.viewed(100.0, view(0, 0)))
    assert d.claims_from(109.0)


# --- 8b


def test_nothing_changed_for_a_ttl_lets_in_with_what_was_seen_as_guard() -> None:
    """Rules 8 and 8b."""
    d = standing_by()
    assert "Claim" not in kinds(d.at(108.999))
    claim = only(e.Claim, d.at(109.0))
    assert claim.seen == (3, 2, 0, 0)
    assert "8b" in claim.why


@pytest.mark.parametrize(
    "later",
    [view(4, 2), view(3, 4), view(4, 4), view(0, 2), view(3, 0), view(0, 0, revision=9)],
    ids=["refreshed", "term written", "claimed", "leader vanished", "term vanished", "both vanished"],
)
def test_any_difference_in_either_key_restarts_the_wait(later: View) -> None:
    """Rule 8b: a key that vanishes by itself is no end either."""
    d = standing_by()
    d.viewed(105.0, later)
    assert d.claims_from(114.0)


def test_a_key_that_appears_restarts_the_wait() -> None:
    """Rule 8b."""
    d = standing_by(0, 2)
    d.viewed(105.0, view(3, 2))
    assert d.claims_from(114.0)


def test_reads_that_show_no_difference_leave_the_wait_alone() -> None:
    """Rule 8b. The store's own revision rises with every write to other keys."""
    d = standing_by()
    d.viewed(105.0, view(3, 2, revision=50))
    assert d.claims_from(109.0)


def test_a_heard_deletion_of_the_version_last_seen_leaves_the_wait_alone() -> None:
    """Rule 8b: an expiry in its time does not make the take-over later."""
    d = standing_by()
    d.at(105.0, deletion(4, previous=3))
    d.viewed(105.1, view(0, 2, revision=4))
    assert d.claims_from(109.0)


@pytest.mark.parametrize("previous", [2, 4, 0, None])
def test_a_heard_deletion_of_another_version_restarts_the_wait(previous: int | None) -> None:
    """Rule 8b: the version last seen was replaced by one that nobody here saw. None: the store cannot tell."""
    d = standing_by()
    d.at(105.0, deletion(5, previous=previous))
    d.viewed(105.1, view(0, 2, revision=5))
    assert d.claims_from(114.1)


def test_a_deletion_heard_before_the_watch_broke_restarts_the_wait() -> None:
    """Rule 8b: the watch must be unbroken."""
    d = standing_by()
    d.at(105.0, deletion(4, previous=3))
    d.at(105.05, e.Gap())
    d.viewed(105.1, view(0, 2, revision=9))
    assert d.claims_from(114.1)


def test_a_deletion_heard_of_the_term_key_restarts_the_wait() -> None:
    """Rule 8b: only of the leader key, which a lease may take away, is a vanishing expected."""
    d = standing_by(0, 2)
    d.at(105.0, deletion(4, previous=2, is_leader=False))
    d.viewed(105.1, view(0, 0, revision=4))
    assert d.claims_from(114.1)


def test_a_heard_deletion_beside_a_changed_term_restarts_the_wait() -> None:
    """Rule 8b: a claim came and went in between."""
    d = standing_by()
    d.at(105.0, deletion(4, previous=3))
    d.viewed(105.1, view(0, 5, revision=6))
    assert d.claims_from(114.1)


def test_the_wait_counts_from_the_arrival_of_the_event_that_was_heard() -> None:
    """Rules 2 and 8b: not from the read that showed it."""
    d = standing_by()
    d.at(103.0, put(12, previous=3))
    d.viewed(104.0, view(12, 2))
    assert d.claims_from(112.0)


def test_the_wait_does_not_count_from_an_event_of_an_older_version() -> None:
    """Rule 8b."""
    d = standing_by()
    d.at(103.0, put(12, previous=3))
    d.viewed(104.0, view(13, 2))
    assert d.claims_from(113.0)


def test_of_two_keys_that_changed_the_later_counts() -> None:
    """Rule 8b: a claim writes both; a refresh after it one."""
    d = standing_by()
    d.at(103.0, put(12, previous=3))
    d.at(103.0, put(12, is_leader=False, previous=2))
    d.at(103.5, put(13, previous=12))
    d.viewed(104.0, view(13, 12))
    assert d.claims_from(112.5)


def test_a_version_heard_before_a_gap_has_stood_since_then() -> None:
    """Rule 8b: a revision is never used twice."""
    d = standing_by()
    d.at(103.0, put(12, previous=3))
    d.at(103.5, e.Gap())
    d.viewed(104.0, view(12, 2))
    assert d.claims_from(112.0)


def test_nothing_is_claimed_on_a_view_that_something_heard_has_made_old() -> None:
    """Rule 8b: read first."""
    d = standing_by()
    assert kinds(d.at(108.8)) == ["Read"]
    d.at(108.9, put(12, previous=3))
    assert not d.claims_at(109.0)
    d.viewed(109.1, view(12, 2))
    assert d.claims_from(117.9)


def test_something_heard_while_a_read_is_under_way_is_read_again() -> None:
    """Rule 8b."""
    d = standing_by()
    assert kinds(d.at(101.0)) == ["Read"]
    assert kinds(d.at(101.1, put(12, previous=3))) == []
    assert kinds(d.viewed(101.2, view(3, 2))) == ["Read"]


def test_a_gap_of_the_watch_forbids_a_claim_until_a_read() -> None:
    """Rule 8b."""
    d = standing_by()
    d.at(108.0, e.Gap())
    d.at(108.1, e.Gap())
    assert not d.claims_at(109.0)
    assert kinds(d.viewed(109.5, view(3, 2))) in (["Read"], ["Claim"])
    d.viewed(109.6, view(3, 2))
    assert isinstance(d.state.phase, Claiming)


def test_the_ttl_is_the_larger_of_our_own_and_the_records() -> None:
    """Rule 8b."""
    longer, shorter = Driver(), Driver()
    longer.viewed(100.0, view(3, 2, ttl_s=20))
    assert longer.claims_from(120.0)
    shorter.viewed(100.0, view(3, 2, ttl_s=6))
    assert shorter.claims_from(109.0)


def test_both_keys_are_polled_beside_the_watch() -> None:
    """Rule 8b."""
    d = Driver()
    assert kinds(d.at(99.0)) == ["Read"]
    d.viewed(100.0, view(3, 2))
    assert kinds(d.at(100.49)) == []
    assert kinds(d.at(100.5)) == ["Read"]
    assert kinds(d.at(101.0)) == [], "one at a time"


def test_a_read_that_failed_is_tried_again_and_leaves_the_wait_alone() -> None:
    d = standing_by()
    assert kinds(d.at(100.5)) == ["Read"]
    d.at(101.0, e.ReadFailed("no answer", 100.5))
    assert kinds(d.at(101.5)) == ["Read"]
    d.at(102.0, e.ReadFailed("no answer", 101.5))
    assert d.claims_from(109.0)


def test_a_claim_does_not_wait_for_a_read_that_hangs() -> None:
    """The claim's guards do what the read would do."""
    d = standing_by()
    assert kinds(d.at(108.9)) == ["Read"]
    assert d.claims_at(109.0)


def test_nobody_claims_without_ever_having_seen_the_keys() -> None:
    d = Driver()
    assert not d.claims_at(99.0)
    d.at(99.5, e.ReadFailed("no answer", 99.0))
    assert not d.claims_at(1e6)


# --- 8c


def test_the_last_term_being_our_own_lets_in_at_once() -> None:
    """Rule 8c."""
    d = Driver(State(StandingBy(), gone=("old", "mine")))
    claim = only(e.Claim, d.viewed(100.0, view(3, 2, instance="mine")))
    assert claim.seen == (3, 2, 0, 0)
    assert "8c" in claim.why


def test_anothers_leader_key_beside_our_own_last_term_is_guarded_all_the_same() -> None:
    """Rule 8c: the claim's guards name both versions."""
    d = Driver(State(StandingBy(), gone=("mine",)))
    shown = replace(view(7, 2, instance="mine"), leader_lease=99)
    assert only(e.Claim, d.viewed(100.0, shown)).seen == (7, 2, 0, 0)


def test_the_last_term_of_an_instance_that_is_not_in_the_journal_must_be_waited_out() -> None:
    """Rule 8c."""
    d = Driver(State(StandingBy(), gone=("mine",)))
    d.viewed(100.0, view(3, 2, instance="mine-too"))
    assert d.claims_from(109.0)


# --- records that cannot be read


def damaged(leader_mod: int, term_mod: int, *, revision: int = 0) -> View:
    shown = view(leader_mod, term_mod, revision=revision)
    return replace(shown, leader=None, term=None, damage=("term: found 'x'",))


def test_a_damaged_record_is_reported_once() -> None:
    d = Driver()
    assert alarms(d.viewed(100.0, damaged(3, 2))) == ["damaged-record"]
    assert alarms(d.viewed(101.0, damaged(3, 2, revision=9))) == []
    assert alarms(d.viewed(102.0, damaged(4, 2, revision=9))) == ["damaged-record"], "another version is another damage"


def test_a_damaged_record_is_waited_out_as_one_that_does_not_change() -> None:
    """Rule 8b; the claim writes a sound one."""
    d = Driver()
    d.viewed(100.0, damaged(3, 2))
    d.viewed(105.0, damaged(3, 2, revision=9))
    assert d.claims_from(109.0)


def test_a_damaged_term_without_a_leader_is_not_ended() -> None:
    """Rule 8a."""
    d = Driver()
    assert "Claim" not in kinds(d.viewed(100.0, damaged(0, 2)))
    assert d.claims_from(109.0)


def test_a_damaged_term_is_never_our_own() -> None:
    """Rule 8c."""
    d = Driver(State(StandingBy(), gone=("other",)))
    assert "Claim" not in kinds(d.viewed(100.0, damaged(3, 2)))


# --- the token floor, history going back, fitness, alarms


def test_the_highest_term_seen_is_kept_on_disk() -> None:
    """Rule 6."""
    d = Driver()
    assert only(e.NoteToken, d.viewed(100.0, view(3, 2))).token == 2
    assert "NoteToken" not in kinds(d.viewed(101.0, view(4, 2)))
    assert only(e.NoteToken, d.viewed(102.0, view(9, 9))).token == 9


def test_a_store_that_is_behind_the_highest_token_is_not_claimed_in_and_reported_once() -> None:
    """Rules 6 and 21: restored from a backup. 8a and 8c count for nothing then."""
    d = Driver(State(StandingBy(), floor=50, gone=("other",)))
    assert alarms(d.viewed(100.0, view(0, 5, ended="now"))) == ["history-went-back"]
    assert alarms(d.viewed(101.0, view(0, 5, ended="now"))) == []
    assert not d.claims_at(200.0)
    assert "Claim" in kinds(d.viewed(201.0, view(0, 5, ended="now", revision=50)))


def test_a_revision_lower_than_before_restarts_the_wait() -> None:
    """Rule 21."""
    d = Driver()
    d.viewed(100.0, view(3, 2, revision=90))
    d.viewed(105.0, view(3, 2, revision=80))
    assert d.claims_from(114.0)


def test_an_unfit_node_never_claims_and_claims_once_it_is_fit() -> None:
    """Rule 12."""
    d = standing_by()
    d.fit = False
    assert not d.claims_at(109.0)
    assert not d.claims_at(500.0)
    assert "Claim" not in kinds(d.viewed(501.0, view(0, 5, ended="now")))
    d.fit = True
    assert d.claims_at(501.1)


def test_nobody_leading_is_reported_once_ten_seconds_after_the_ttl() -> None:
    """Rule 19."""
    d = standing_by()
    d.fit = False
    assert alarms(d.at(119.0)) == []
    assert alarms(d.at(119.1)) == ["nobody-leads"]
    assert alarms(d.at(300.0)) == []


def test_a_standby_told_to_stand_down_is_not_disturbed_and_told_to_leave_leaves() -> None:
    d = standing_by()
    d.at(101.0, e.StandDown("as told"))
    assert isinstance(d.state.phase, StandingBy)
    d.at(102.0, e.StandDown("as told", leave=True))
    assert isinstance(d.state.phase, Left)
    assert d.at(200.0) == []


def test_what_was_heard_is_kept_within_bounds() -> None:
    d = standing_by()
    for mod in range(10, 1000):
        d.at(101.0, put(mod))
    assert isinstance(d.state.phase, StandingBy)
    assert len(d.state.phase.heard) == HEARD_KEPT


# --- the claim and its answer


def test_a_claim_that_was_applied_arms_the_switch_from_before_its_send() -> None:
    """Rules 2, 6 and 16."""
    d, claim = claiming()
    actions = d.at(109.3, e.Claimed(ours(claim), 109.1))
    assert only(e.Arm, actions).deadline == 109.1 + 8.5
    assert only(e.NoteToken, actions).token == 20
    assert "TakeOver" not in kinds(actions)
    assert isinstance(d.state.phase, Holding)
    assert (d.state.phase.t0, d.state.floor) == (109.1, 20)


def test_a_claim_that_was_refused_gives_the_lease_back_and_keeps_its_wait() -> None:
    """Rule 8b: nothing changed by it, so nothing restarts."""
    d, claim = claiming()
    assert only(e.Revoke, d.at(109.1, failed(claim, "refused"))).lease == 7
    assert kinds(d.at(109.1)) == ["Read"], "read before the next claim"
    again = only(e.Claim, d.viewed(109.2, view(3, 2)))
    assert again.instance != claim.instance


def test_a_claim_refused_because_another_was_faster_waits_for_that_one() -> None:
    """Rule 8b; the other's claim was heard while ours was under way."""
    d, claim = claiming()
    d.at(109.05, put(12, previous=3))
    d.at(109.05, put(12, is_leader=False, previous=2))
    d.at(109.1, failed(claim, "refused"))
    d.viewed(109.2, view(12, 12))
    assert d.claims_from(118.05)


def test_a_claim_that_was_not_sent_is_tried_again_a_little_later() -> None:
    d, claim = claiming()
    assert "Revoke" not in kinds(d.at(109.1, failed(claim, "not sent", lease=0)))
    d.viewed(109.2, view(3, 2))
    assert d.claims_from(109.6)


def test_an_answer_for_another_instance_means_nothing() -> None:
    """Rule 7."""
    d, _ = claiming()
    before = d.state
    assert d.at(109.1, e.Claimed(e.Term("earlier", 20, 7), 100.0)) == []
    assert d.at(109.1, e.ClaimFailed("earlier", 7, 100.0, "refused", "")) == []
    assert d.state == before


def test_an_ambiguous_claim_is_read_back_at_once() -> None:
    """Rule 7."""
    d, claim = claiming()
    assert "Read" in kinds(d.at(109.4, failed(claim, "ambiguous")))
    assert not [action for action in d.at(109.45) if isinstance(action, e.Read)]


def test_an_ambiguous_claim_that_is_ours_counts_from_before_its_send() -> None:
    """Rule 7: the token is the term's mod_revision."""
    d, claim = claiming()
    d.at(109.4, failed(claim, "ambiguous", t0=109.0))
    actions = d.viewed(109.5, view(20, 20, instance=claim.instance, lease=7))
    assert only(e.Arm, actions) == e.Arm(e.Term(claim.instance, 20, 7, "then"), 109.0 + 8.5)


@pytest.mark.parametrize(
    "case", ["nothing changed", "another", "key under another lease", "leader gone", "other instance in the leader key"]
)
def test_an_ambiguous_claim_that_is_not_plainly_ours_is_abandoned_and_its_lease_revoked(case: str) -> None:
    """Rule 7: it may still arrive, and cannot be applied without its lease."""
    d, claim = claiming()
    d.at(109.4, failed(claim, "ambiguous"))
    found = {
        "nothing changed": view(3, 2),
        "another": view(12, 12, instance="faster"),
        "key under another lease": view(20, 20, instance=claim.instance, lease=8),
        "leader gone": view(0, 20, instance=claim.instance),
        "other instance in the leader key": replace(
            view(20, 20, instance=claim.instance, lease=7), leader=view(1, 1, instance="x").leader
        ),
    }[case]
    assert only(e.Revoke, d.viewed(109.5, found)).lease == 7
    assert isinstance(d.state.phase, StandingBy)
    assert claim.instance in d.state.gone


def test_an_abandoned_claim_that_arrives_late_is_never_adopted() -> None:
    """Rule 7: another claim, under a new instance, guarded by what arrived (8c: nothing ran under it)."""
    d, claim = claiming()
    d.at(109.4, failed(claim, "ambiguous"))
    d.viewed(109.5, view(3, 2))
    d.at(109.6)
    actions = d.viewed(110.0, view(20, 20, instance=claim.instance, lease=7))
    assert not isinstance(d.state.phase, Holding)
    again = only(e.Claim, actions)
    assert again.instance != claim.instance
    assert again.seen == (20, 20, 0, 0)


def test_an_answer_to_an_abandoned_claim_means_nothing() -> None:
    """Rule 7."""
    d, claim = claiming()
    d.at(109.4, failed(claim, "ambiguous"))
    d.viewed(109.5, view(3, 2))
    d.at(109.6, e.Claimed(ours(claim), 109.0))
    assert isinstance(d.state.phase, StandingBy)


def test_an_abandoned_claim_keeps_the_wait_and_is_repeated_a_little_later() -> None:
    d, claim = claiming()
    d.at(109.4, failed(claim, "ambiguous"))
    d.viewed(109.5, view(3, 2))
    assert kinds(d.at(109.5)) == ["Read"]
    d.viewed(109.6, view(3, 2))
    assert d.claims_from(110.0)


def test_reading_back_is_repeated_until_the_deadline_and_the_claim_then_abandoned() -> None:
    """Rule 7."""
    d, claim = claiming()
    d.at(109.4, failed(claim, "ambiguous", t0=109.0))
    now = 109.8
    while now < 116.4:
        d.at(now, e.ReadFailed("no answer", now))
        assert "Read" in kinds(d.at(now + 0.5))
        now += 1.0
    assert only(e.Revoke, d.at(116.5)).lease == 7
    assert isinstance(d.state.phase, StandingBy)
    assert claim.instance in d.state.gone


def test_a_claim_without_a_lease_has_none_to_revoke() -> None:
    d, claim = claiming()
    d.at(109.4, failed(claim, "ambiguous", lease=0))
    assert "Revoke" not in kinds(d.viewed(109.5, view(3, 2)))


def test_a_claim_answered_after_its_deadline_is_ended_in_good_order() -> None:
    """Rule 7: the deadline must not have passed."""
    d, claim = claiming()
    actions = d.at(116.5, e.Claimed(ours(claim), 109.0))
    assert only(e.End, actions).term.token == 20
    assert "Arm" not in kinds(actions)
    assert isinstance(d.state.phase, Ending)
    assert claim.instance in d.state.gone


def test_a_claim_read_back_after_its_deadline_is_ended_in_good_order() -> None:
    """Rule 7."""
    d, claim = claiming()
    d.at(109.4, failed(claim, "ambiguous", t0=109.0))
    actions = d.viewed(116.5, view(20, 20, instance=claim.instance, lease=7))
    assert kinds(actions)[-1] == "End"
    assert isinstance(d.state.phase, Ending)


def test_a_token_below_the_highest_ever_seen_starts_nothing() -> None:
    """Rule 6."""
    d, claim = claiming()
    d.state = replace(d.state, floor=21)
    actions = d.at(109.3, e.Claimed(ours(claim, token=20), 109.0))
    assert kinds(actions) == ["End"]
    assert "below 21" in only(e.End, actions).because


def test_a_node_that_is_told_to_leave_while_it_claims_ends_what_it_got() -> None:
    d, claim = claiming()
    d.at(109.1, e.StandDown("as told", leave=True))
    assert kinds(d.at(109.3, e.Claimed(ours(claim), 109.0))) == ["End"]
    assert only(e.Revoke, d.at(109.4, e.Ended(20, overtaken=False))).lease == 7
    assert isinstance(d.state.phase, Left)


def test_a_node_that_is_told_to_leave_while_it_reads_back_leaves_no_lease_behind() -> None:
    d, claim = claiming()
    d.at(109.4, failed(claim, "ambiguous"))
    d.at(109.45, e.StandDown("as told", leave=True))
    assert only(e.Revoke, d.viewed(109.5, view(3, 2))).lease == 7
    assert isinstance(d.state.phase, Left)


def test_a_gap_while_claiming_forgets_the_deletion_heard_before() -> None:
    """Rule 8b: the watch must be unbroken."""
    d, claim = claiming()
    d.at(109.1, deletion(4, previous=3))
    d.at(109.2, e.Gap())
    d.at(109.3, failed(claim, "refused"))
    d.viewed(109.4, view(0, 2, revision=9))
    assert d.claims_from(118.4)


@pytest.mark.parametrize(
    "event",
    [
        e.Tick(),
        e.Refreshed("n", 100.0),
        e.Armed(20, 110.0),
        e.ArmFailed(20, ""),
        e.TookOver(20),
        e.TakeOverFailed(20, ""),
        e.Gone(20),
        e.Ended(20, overtaken=False),
        e.EndFailed(20, ""),
        e.Suspect("clock"),
        e.StandDown("as told"),
        e.FenceNow("keeper"),
        e.Viewed(view(20, 20), 108.0),
        e.ReadFailed("", 108.0),
    ],
    ids=lambda event: type(event).__name__,
)
def test_events_that_mean_nothing_to_a_claim_change_nothing(event: e.Event) -> None:
    d, _ = claiming()
    before = d.state.phase
    assert [action for action in d.at(109.1, event) if not isinstance(action, e.NoteToken)] == []
    assert d.state.phase == before


# --- what operators want (rule 12)


MARK = Mark(since="then", on="n9", because="as told")
ENDED = view(0, 5, instance="old", ended="now")


def here(**changed: Any) -> Driver:
    return Driver(State(StandingBy(), node="here", **changed))


def asked(target: str, instance: str = "old", refused: str | None = None) -> View:
    request = SwitchoverRecord(target=target, instance=instance, hold_back_s=3.0, asked="", on="n9", refused=refused)
    return replace(ENDED, switchover=request, switchover_mod=4)


def with_settings(shown: View, mod: int = 4, **settings: Any) -> View:
    return replace(shown, settings=SettingsRecord(**settings), settings_mod=mod)


@pytest.mark.parametrize("settings", [{"paused": MARK}, {"excluded": {"here": MARK}}], ids=["paused", "excluded"])
def test_nobody_claims_against_the_word_of_an_operator_however_long_it_waits(settings: dict[str, Any]) -> None:
    d = here(gone=("mine",))
    for shown in (view(0, 5, ended="now"), view(3, 2), view(3, 2, instance="mine")):
        assert "Claim" not in kinds(d.viewed(100.0, with_settings(replace(shown, revision=9), **settings)))
        assert not d.claims_at(1000.0)


def test_the_exclusion_of_another_node_keeps_nobody_from_a_claim() -> None:
    d = here()
    assert only(e.Claim, d.viewed(100.0, with_settings(ENDED, excluded={"there": MARK}))).seen == (0, 5, 4, 0)


def test_the_end_of_a_pause_lets_in_at_once_who_has_waited_long_enough() -> None:
    """The wait of rule 8b is about leader and term alone."""
    d = here()
    d.viewed(100.0, with_settings(view(3, 2), paused=MARK))
    assert not d.claims_at(109.5)
    d.viewed(109.6, with_settings(view(3, 2), paused=MARK))
    assert "Read" in kinds(d.at(109.65, e.Changed()))
    assert only(e.Claim, d.viewed(109.7, with_settings(replace(view(3, 2), revision=9), mod=9))).seen == (3, 2, 9, 0)


def test_the_target_of_a_switchover_claims_at_once_and_the_others_hold_back() -> None:
    claim = only(e.Claim, here(claim_delay=1.0).viewed(100.0, asked("here")))
    assert claim.seen == (0, 5, 0, 4)
    d = here()
    assert "Claim" not in kinds(d.viewed(100.0, asked("there")))
    assert d.claims_from(103.0)


@pytest.mark.parametrize("shown", [asked("there", instance="older"), asked("there", refused="no")])
def test_nobody_holds_back_for_a_request_of_another_term_or_one_that_was_refused(shown: View) -> None:
    assert "Claim" in kinds(here().viewed(100.0, shown))


def test_nobody_holds_back_where_the_old_holder_did_not_end_in_good_order() -> None:
    """It may have died of the switchover, and its target with it."""
    d = here()
    request = asked("there").switchover
    d.viewed(100.0, replace(view(3, 2, instance="old"), switchover=request, switchover_mod=4, revision=5))
    assert d.claims_from(109.0)


def test_a_lower_priority_delays_a_claim_and_nothing_else() -> None:
    d = here(claim_delay=0.4)
    d.viewed(100.0, view(3, 2))
    assert d.claims_from(109.4)
    d = here(claim_delay=0.4)
    d.viewed(100.0, ENDED)
    assert d.claims_from(100.4)


# --- a store that went back (rule 21)


def test_a_store_that_went_back_proves_no_end_and_its_wait_begins_anew() -> None:
    d = here(gone=("mine",), revision=90)
    assert alarms(d.viewed(100.0, view(0, 5, ended="now", revision=80))) == ["history-went-back"]
    assert d.claims_from(109.0)
    d = here(gone=("mine",), revision=90)
    d.viewed(100.0, view(3, 2, instance="mine", revision=80))
    assert d.claims_from(109.0)


def test_an_end_recorded_after_the_store_went_back_counts_again() -> None:
    d = here(revision=90)
    d.viewed(100.0, view(3, 2, revision=80))
    assert "Claim" in kinds(d.viewed(101.0, view(0, 81, ended="now", revision=81)))


def test_the_revision_of_a_store_that_went_back_is_kept_only_a_ttl_later() -> None:
    """A supervisor that is restarted meanwhile distrusts it again."""
    d = here(revision=90, noted_at=99.0)
    assert "NoteRevision" not in kinds(d.viewed(100.0, view(3, 2, revision=80)))
    assert "NoteRevision" not in kinds(d.viewed(159.9, view(3, 2, revision=81)))
    assert only(e.NoteRevision, d.viewed(160.0, view(3, 2, revision=82))).revision == 82


def test_a_term_older_than_one_that_was_seen_proves_no_end() -> None:
    """A backup that was restored with a bumped revision shows it."""
    d = here(floor=50, gone=("mine",))
    d.viewed(100.0, view(0, 5, ended="now", revision=2000))
    assert d.claims_from(109.0)
