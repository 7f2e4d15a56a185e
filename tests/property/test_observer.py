"""The observer's sums against the truth: any timeline of processes, sampled at any moments."""

import itertools
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from supervisor.demo.observer import INSTANT, Process, Sample, account

TOLERANCE = 1e-6


@dataclass(frozen=True)
class Life:
    """A process from `start` until `end`."""

    node: str
    start: float
    end: float

    def at(self, moment: float) -> bool:
        return self.start <= moment < self.end


lives = st.lists(
    st.builds(
        lambda node, start, length: Life(node, start, start + length),
        st.sampled_from(["node1", "node2", "node3"]),
        st.integers(0, 1000).map(lambda n: n / 100),
        st.integers(1, 500).map(lambda n: n / 100),
    ),
    min_size=1,
    max_size=6,
)
distances = st.lists(st.integers(1, 60).map(lambda n: n / 100), min_size=2, max_size=60)


def sampled(timeline: list[Life], moments: list[float]) -> list[Sample]:
    return [
        Sample(at, frozenset(Process(i, x.node, i, x.start) for i, x in enumerate(timeline) if x.at(at)))
        for at in moments
    ]


def pieces(timeline: list[Life], first: float, last: float) -> list[tuple[float, float, int]]:
    """(start, end, number of nodes) between all changes, within [first, last]."""
    edges = sorted({first, last} | {e for x in timeline for e in (x.start, x.end) if first < e < last})
    return [(a, b, len({x.node for x in timeline if x.at((a + b) / 2)})) for a, b in itertools.pairwise(edges)]


def moments_of(steps: list[float]) -> list[float]:
    moments = [0.0]
    for step in steps:
        moments.append(moments[-1] + step)
    return moments


@given(lives, distances)
def test_no_overlap_is_reported_where_none_was_seen_and_never_more_than_fits_between_the_samples(
    timeline: list[Life], steps: list[float]
) -> None:
    moments = moments_of(steps)
    samples = sampled(timeline, moments)
    doubled = [len(sample.nodes) > 1 for sample in samples]
    reported = account(samples).overlap
    if not any(doubled):
        assert reported == 0
    # What is seen at both ends of a distance is taken to have been there between them.
    most = sum(
        b - a if before and after else sum(d - c for c, d, nodes in pieces(timeline, a, b) if nodes > 1)
        for (a, before), (b, after) in itertools.pairwise(zip(moments, doubled, strict=True))
    )
    assert reported <= most + sum(doubled) * INSTANT + TOLERANCE


@given(lives, distances)
def test_an_overlap_is_missed_by_less_than_one_distance_between_samples_at_each_change(
    timeline: list[Life], steps: list[float]
) -> None:
    moments = moments_of(steps)
    total = account(sampled(timeline, moments))
    found = pieces(timeline, moments[0], moments[-1])
    truth = sum(b - a for a, b, nodes in found if nodes > 1)
    assert total.overlap >= truth - len(timeline) * 2 * max(steps) - TOLERANCE
    for a, b, nodes in found:
        if nodes > 1 and any(a <= moment < b for moment in moments):
            assert total.overlap > 0


@given(lives, distances)
def test_the_gap_is_right_to_within_two_distances_between_samples(timeline: list[Life], steps: list[float]) -> None:
    moments = moments_of(steps)
    samples = sampled(timeline, moments)
    seen = [sample.at for sample in samples if sample.processes]
    total = account(samples)
    if not seen:
        assert total.gap == 0
        return
    first = min(x.start for x in timeline if any(x.at(m) for m in moments))
    truth = 0.0
    open_since: float | None = None
    for a, b, nodes in pieces(timeline, max(first, moments[0]), moments[-1]):
        open_since = (a if open_since is None else open_since) if nodes == 0 else None
        if open_since is not None:
            truth = max(truth, b - open_since)
    assert total.gap >= truth - 2 * max(steps) - TOLERANCE
