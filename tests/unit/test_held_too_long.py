"""For how long a lock may be held: a pure decision."""

import math
import os

import pytest

from supervisor.config.service import Service
from supervisor.lockwatch import UNLIMITED, Held, Limits, held_too_long, limits_for

H = 3600.0
HOLDER = {"service": "batch", "pid": 7, "since": 1.0, "token": 3}


def spec(**fields: object) -> Service:
    return Service.model_validate({"command": ("true",), "user": os.geteuid(), "gpu": 0, "lock": "on-demand"} | fields)


@pytest.mark.parametrize(
    ("hours", "verdict"),
    [
        (0, Held.FINE),
        (4, Held.FINE),
        (4.001, Held.WARNING),
        (6, Held.WARNING),
        (6.001, Held.ALARM),
        (1000, Held.ALARM),
    ],
)
def test_over_four_hours_is_a_warning_and_over_six_an_alarm(hours: float, verdict: Held) -> None:
    assert held_too_long(HOLDER, 1000.0, 1000.0 + hours * H, Limits()) is verdict


def test_a_lock_that_nobody_holds_is_never_held_too_long() -> None:
    assert held_too_long(None, 0.0, 1e9, Limits()) is Held.FINE


def test_the_wall_clock_of_the_holder_plays_no_part() -> None:
    assert held_too_long({**HOLDER, "since": -1e12}, 10.0, 20.0, Limits()) is Held.FINE


def test_a_lifetime_service_may_hold_its_lock_for_ever() -> None:
    limits = limits_for(HOLDER, {"batch": spec(lock="lifetime")})
    assert limits == UNLIMITED
    assert held_too_long(HOLDER, 0.0, 1e9, limits) is Held.FINE


@pytest.mark.parametrize("lock", ["lifetime", "on-demand"])
def test_max_hold_replaces_both_limits_for_either_kind_of_service(lock: str) -> None:
    limits = limits_for(HOLDER, {"batch": spec(lock=lock, max_hold="10h")})
    assert [held_too_long(HOLDER, 0.0, hours * H, limits) for hours in (7, 10, 10.1)] == [
        Held.FINE,
        Held.FINE,
        Held.ALARM,
    ]


def test_jobs_outside_any_service_and_on_demand_services_have_the_default_limits() -> None:
    assert limits_for({"service": "job"}, {"batch": spec(lock="lifetime")}) == Limits(4 * H, 6 * H)
    assert limits_for({"service": None}, {}) == Limits(4 * H, 6 * H)
    assert limits_for(HOLDER, {"batch": spec()}) == Limits(4 * H, 6 * H)


def test_no_limit_is_no_number() -> None:
    assert math.isinf(UNLIMITED.warning)
    assert math.isinf(UNLIMITED.alarm)
