"""The watchdog's one decision, from made-up looks: what is confirmed, and above all what is not."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from supervisor.gpu.holders import Hold
from supervisor.service.footprint import Footprint
from supervisor.watchdog.snapshot import Process, ServiceSeen, Stuck, Target
from supervisor.watchdog.verdict import Kind, Memory, Rules, Verdict, decide, forget_suspicions

RULES = Rules(confirm=3.0, stuck_for=60.0)
MAIN = (100, 5000)
HELPER = (101, 5001)


class Cgroup(Footprint):
    """Only says that there is a cgroup."""

    def __init__(self) -> None:
        self.cgroup = "/gpuward/term-1/llm"


TARGET = Target(
    name="llm",
    footprint=Cgroup(),
    started_at=0.0,
    gpu=0,
    device=Path("/dev/nvidia0"),
    lock_file=Path("/run/gpuward/gpu-0.lock"),
    needs_device=True,
    start_grace=60.0,
    has_mutex=True,
)


def process(who: tuple[int, int] = MAIN, device: Hold = Hold.NOT_HELD, **other: Any) -> Process:
    fields: dict[str, Any] = {"zombie": False, "stuck": (), "unit": "/main", "flock": False} | other
    return Process(who=who, device=device, **fields)


def seen(*processes: Process, target: Target = TARGET, **other: Any) -> ServiceSeen:
    fields: dict[str, Any] = {"main_there": True, "frozen": False, "device_found": True, "job_mutex": False} | other
    return ServiceSeen(target=target, main=MAIN, processes=processes, **fields)


class Looks:
    """A watchdog's memory over several looks."""

    def __init__(self) -> None:
        self.history: Mapping[str, Memory] = {}

    def at(self, now: float, service: ServiceSeen, listed: frozenset[int] = frozenset()) -> Verdict:
        (verdict,), self.history = decide([service], self.history, RULES, now=now, listed=listed)
        return verdict


HOLDING = seen(process(device=Hold.HELD))
LOST = seen(process())


def test_a_service_that_holds_its_device_is_healthy() -> None:
    assert Looks().at(100, HOLDING).kind is Kind.HEALTHY


def test_a_lost_device_is_confirmed_by_a_second_look_only() -> None:
    looks = Looks()
    looks.at(100, HOLDING)
    first = looks.at(160, LOST)
    assert (first.kind, first.confirmed) == (Kind.LOST_GPU, False)
    assert not looks.at(162.9, LOST).confirmed
    second = looks.at(163, LOST)
    assert (second.kind, second.confirmed) == (Kind.LOST_GPU, True)
    assert "GPU 0" in second.evidence


def test_a_device_that_is_back_at_the_second_look_was_not_lost() -> None:
    looks = Looks()
    looks.at(100, HOLDING)
    looks.at(160, LOST)
    assert looks.at(163, HOLDING).kind is Kind.HEALTHY
    assert not looks.at(223, LOST).confirmed


def test_what_never_held_the_device_cannot_have_lost_it() -> None:
    """gpu-facts: imports, downloads and compilation come before the device is opened."""
    looks = Looks()
    assert looks.at(10, LOST).kind is Kind.HEALTHY
    assert looks.at(59, LOST).kind is Kind.HEALTHY


def test_a_device_not_opened_within_the_grace_is_a_start_failure() -> None:
    looks = Looks()
    assert not looks.at(60, LOST).confirmed
    verdict = looks.at(63, LOST)
    assert (verdict.kind, verdict.confirmed) == (Kind.NO_GPU, True)


@pytest.mark.parametrize("held_before", [True, False])
def test_unknown_is_never_lost(held_before: bool) -> None:
    """gpu-facts: an unreadable /proc/PID/fd is unknown, whatever was seen before and however often."""
    looks = Looks()
    if held_before:
        looks.at(100, HOLDING)
    for now in (160, 163, 220, 223):
        verdict = looks.at(now, seen(process(), process(HELPER, Hold.UNKNOWN)))
        assert (verdict.kind, verdict.confirmed) == (Kind.UNKNOWN, False)


def test_an_unknown_look_between_two_suspicions_starts_them_anew() -> None:
    looks = Looks()
    looks.at(100, HOLDING)
    looks.at(160, LOST)
    looks.at(161, seen(process(device=Hold.UNKNOWN)))
    assert not looks.at(163, LOST).confirmed


def test_a_missing_device_node_is_unknown() -> None:
    looks = Looks()
    looks.at(100, HOLDING)
    looks.at(160, seen(process(), device_found=False))
    assert looks.at(163, seen(process(), device_found=False)).kind is Kind.UNKNOWN


def test_a_child_with_the_device_counts_for_the_service() -> None:
    """mxnet 4242: the parent is a zombie or has nothing open, a child has the GPU. The cgroup is what counts."""
    looks = Looks()
    family = seen(process(), process(HELPER, Hold.HELD))
    assert [looks.at(now, family).kind for now in (100, 103, 160)] == [Kind.HEALTHY] * 3
    helpers_zombie = seen(process(device=Hold.HELD), process(HELPER, zombie=True))
    assert looks.at(163, helpers_zombie).kind is Kind.HEALTHY


def test_what_the_driver_still_lists_is_not_lost() -> None:
    looks = Looks()
    looks.at(100, HOLDING)
    looks.at(160, LOST)
    assert looks.at(163, LOST, frozenset({MAIN[0]})).kind is Kind.UNKNOWN


def test_a_service_that_may_let_go_of_the_device_is_healthy_without_it() -> None:
    """`gpu_fd: optional`: unloads its model, or takes turns."""
    optional = replace(TARGET, needs_device=False)
    looks = Looks()
    looks.at(100, replace(HOLDING, target=optional))
    assert [looks.at(now, replace(LOST, target=optional)).kind for now in (160, 163)] == [Kind.HEALTHY] * 2


def test_a_frozen_service_is_left_alone() -> None:
    looks = Looks()
    looks.at(100, HOLDING)
    looks.at(160, LOST)
    assert looks.at(163, replace(LOST, frozen=True)).kind is Kind.UNKNOWN
    assert not looks.at(166, LOST).confirmed


def test_a_gap_in_our_own_time_voids_every_suspicion() -> None:
    """SIGSTOP of the supervisor for rounds, then SIGCONT: nothing healthy is killed."""
    looks = Looks()
    looks.at(100, HOLDING)
    looks.at(160, LOST)
    looks.history = forget_suspicions(looks.history)
    assert not looks.at(500, LOST).confirmed
    assert looks.at(503, LOST).confirmed


def test_a_new_process_starts_with_no_suspicion() -> None:
    """kubernetes 53530: liveness failures were counted across a restart."""
    looks = Looks()
    looks.at(100, HOLDING)
    looks.at(160, LOST)
    young = replace(LOST, main=(200, 9000), target=replace(TARGET, started_at=161))
    assert looks.at(163, young).kind is Kind.HEALTHY


def test_a_main_process_that_is_gone_is_dead() -> None:
    looks = Looks()
    looks.at(100, replace(HOLDING, main_there=False))
    verdict = looks.at(103, replace(HOLDING, main_there=False))
    assert (verdict.kind, verdict.confirmed) == (Kind.DEAD, True)


def test_an_unreaped_main_process_is_a_zombie() -> None:
    looks = Looks()
    looks.at(100, seen(process(zombie=True)))
    assert looks.at(103, seen(process(zombie=True))).kind is Kind.ZOMBIE


def test_a_thread_stuck_in_the_kernel_for_an_interval_is_a_d_state() -> None:
    """unsloth 3331: a process stuck in the driver."""
    stuck = seen(process(device=Hold.HELD, stuck=(Stuck(tid=100, switches=7),)))
    looks = Looks()
    assert looks.at(100, stuck).kind is Kind.HEALTHY
    assert looks.at(159, stuck).kind is Kind.HEALTHY
    assert not looks.at(160, stuck).confirmed
    verdict = looks.at(163, stuck)
    assert (verdict.kind, verdict.confirmed) == (Kind.D_STATE, True)


def test_a_thread_that_waits_for_a_disk_again_and_again_is_healthy() -> None:
    looks = Looks()
    for number, now in enumerate((100, 160, 163, 220, 223)):
        busy = seen(process(device=Hold.HELD, stuck=(Stuck(tid=100, switches=number),)))
        assert looks.at(now, busy).kind is Kind.HEALTHY


def test_an_empty_cgroup_is_empty() -> None:
    looks = Looks()
    looks.at(100, seen())
    verdict = looks.at(103, seen())
    assert (verdict.kind, verdict.confirmed) == (Kind.EMPTY, True)


ON_DEMAND = replace(TARGET, has_mutex=False, needs_device=False)


def test_the_device_without_the_mutex_is_confirmed_for_the_same_process_only() -> None:
    looks = Looks()
    first = looks.at(100, seen(process(HELPER, Hold.HELD), target=ON_DEMAND))
    assert (first.kind, first.confirmed) == (Kind.DEVICE_WITHOUT_MUTEX, False)
    other = looks.at(103, seen(process((102, 5002), Hold.HELD), target=ON_DEMAND))
    assert not other.confirmed
    again = looks.at(106, seen(process((102, 5002), Hold.HELD), process(HELPER, Hold.HELD), target=ON_DEMAND))
    assert again.confirmed
    assert again.offenders == ((102, 5002),)


@pytest.mark.parametrize(
    "lawful",
    [
        seen(process(HELPER, Hold.HELD, flock=True), target=ON_DEMAND),
        seen(process(HELPER, Hold.HELD, unit="/job-1"), target=ON_DEMAND, job_mutex=True),
        seen(
            process(HELPER, Hold.HELD, unit="/job-1"),
            process((102, 5002), unit="/job-1", flock=True),
            target=ON_DEMAND,
        ),
        seen(process(HELPER, Hold.HELD, unit=None), target=ON_DEMAND, job_mutex=True),
        seen(process(HELPER, Hold.HELD), target=replace(ON_DEMAND, has_mutex=True)),
        seen(process(HELPER, Hold.UNKNOWN), target=ON_DEMAND),
    ],
    ids=["own flock", "keeper's duplicate", "flock in the same job", "weak containment", "lifetime", "unknown"],
)
def test_who_is_covered_by_the_mutex(lawful: ServiceSeen) -> None:
    assert Looks().at(100, lawful).kind is Kind.HEALTHY


@pytest.mark.parametrize("unit", ["/main", "/side-proxy", "/look-ready"])
def test_the_mutex_of_a_job_does_not_cover_the_service_beside_it(unit: str) -> None:
    beside = seen(process(MAIN, Hold.HELD, unit=unit), target=ON_DEMAND, job_mutex=True)
    assert Looks().at(100, beside).kind is Kind.DEVICE_WITHOUT_MUTEX


def announced(*, heard_at: float | None = None, **sections: float) -> ServiceSeen:
    """`pid_101=5.0`: a section of process 101 since 5.0."""
    since = {(int(name.removeprefix("pid_")), "1"): at for name, at in sections.items()}
    target = replace(TARGET, sections=since, max_section=60.0, heard_at=heard_at, heartbeat=30.0)
    return seen(process(device=Hold.HELD), process(HELPER), target=target)


def test_a_section_is_too_long_after_its_limit_and_confirmed_by_a_second_look() -> None:
    looks = Looks()
    assert looks.at(64.9, announced(pid_101=5.0)).kind is Kind.HEALTHY
    assert not looks.at(65.1, announced(pid_101=5.0)).confirmed
    verdict = looks.at(68.2, announced(pid_101=5.0))
    assert (verdict.kind, verdict.confirmed) == (Kind.LONG_SECTION, True)
    assert "GPU section of 101 for 63 s" in verdict.evidence


def test_a_section_of_a_process_that_has_ended_is_over() -> None:
    assert Looks().at(1000, announced(pid_999=5.0)).kind is Kind.HEALTHY


def test_heartbeats_count_only_once_one_is_expected() -> None:
    looks = Looks()
    assert looks.at(1000, announced()).kind is Kind.HEALTHY
    assert looks.at(1001, announced(heard_at=980.0)).kind is Kind.HEALTHY
    assert looks.at(1011, announced(heard_at=980.0)).kind is Kind.SILENT


def test_a_graver_finding_wins_over_what_a_service_announced() -> None:
    target = replace(TARGET, heard_at=0.0, heartbeat=1.0)
    looks = Looks()
    looks.at(100, seen(process(device=Hold.HELD), target=target))
    assert looks.at(101, seen(process(), target=target)).kind is Kind.LOST_GPU


def test_a_service_whose_liveness_looks_fail_is_not_alive_once_a_second_look_says_so_too() -> None:
    dead = seen(process(MAIN), target=replace(ON_DEMAND, not_alive="3 looks in a row failed: no answer within 5 s"))
    looks = Looks()
    first, second = looks.at(1000, dead), looks.at(1003, dead)
    assert (first.kind, first.confirmed) == (Kind.NOT_ALIVE, False)
    assert (second.kind, second.confirmed) == (Kind.NOT_ALIVE, True)
    assert "no answer within 5 s" in second.evidence
