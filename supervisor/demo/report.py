"""What a demo has shown: one pure function from what was seen to one JSON object, and the same for people."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from supervisor.demo.watch import Term

CONTAINMENT = {"process-group": "process-group: no cgroup to be had here, so what leaves its process group escapes"}
"""Where the word alone does not say what it means."""


@dataclass(frozen=True)
class Seen:
    """All that a demo saw."""

    fault: str
    takeovers_expected: int
    store: str
    ttl: int
    containment: str
    services_expected: int
    terms: Sequence[Term]
    works: dict[int, dict[str, Any]]
    """By token: what the node that took over says of it, `work_s` and `steps`."""
    observer: dict[str, Any]
    running: int
    """Services at the end, on the node that leads."""
    complete: str | None
    """The only active node at the end, if it has all services running."""
    trouble: str | None = None
    """Why the demo could not do what it was to do."""


def summarize(seen: Seen) -> dict[str, Any]:
    """The result. `ok`: no overlap, as many take-overs as the fault calls for, and at the end all services on exactly
    one node. `detected_s`: from the last refresh of the old term to the claim; `work_s`: from the claim to
    `/leader` 200, null where the node did not tell."""
    takeovers = [_takeover(old, new, seen.works) for old, new in zip(seen.terms, seen.terms[1:], strict=False)]
    ok = (
        seen.trouble is None
        and seen.observer["overlap_s"] == 0
        and len(takeovers) == seen.takeovers_expected
        and seen.complete is not None
    )
    result = {
        "fault": seen.fault,
        "store": seen.store,
        "ttl_s": seen.ttl,
        "containment": seen.containment,
        "takeovers": takeovers,
        "overlap_s": seen.observer["overlap_s"],
        "gap_s": seen.observer["gap_s"],
        "services": {"expected": seen.services_expected, "running": seen.running},
        "observer": {key: seen.observer[key] for key in ("samples", "longest_gap_s", "late")},
        "ok": ok,
    }
    return result if seen.trouble is None else result | {"trouble": seen.trouble}


def failures(result: dict[str, Any], expected: int) -> list[str]:
    """Why it is not ok, a sentence each."""
    found = [result["trouble"]] if "trouble" in result else []
    if result["overlap_s"]:
        found.append(f"two nodes had service processes at once for {result['overlap_s']:.3f} s")
    if len(result["takeovers"]) != expected:
        found.append(f"{len(result['takeovers'])} take-overs, expected {expected}")
    if not result["ok"] and not found:
        running, wanted = result["services"]["running"], result["services"]["expected"]
        found.append(f"at the end not exactly one node had all services: {running} of {wanted} run")
    return found


def lines(result: dict[str, Any], proves: str, expected: int) -> list[str]:
    """For people: what was shown, and the figures."""
    text = ["", f"fault {result['fault']}, store {result['store']}, TTL {result['ttl_s']} s: {proves}", ""]
    for takeover in result["takeovers"]:
        work = takeover["work_s"]
        text.append(
            f"take-over      {takeover['from']} → {takeover['to']}, token {takeover['token']}: claimed "
            f"{takeover['detected_s']:.2f} s after the last refresh, "
            + ("work unknown" if work is None else f"{work * 1000:.0f} ms of work")
        )
        if takeover["steps"]:
            steps = ", ".join(f"{name} {seconds * 1000:.0f}" for name, seconds in takeover["steps"].items())
            text.append(f"               steps in ms: {steps}")
    services, observer = result["services"], result["observer"]
    text += [
        f"two at once    {result['overlap_s']:.3f} s",
        f"without any    {result['gap_s']:.2f} s, the longest time with no service process",
        f"services       {services['running']} of {services['expected']} running at the end",
        f"containment    {CONTAINMENT.get(result['containment'], result['containment'])}",
        f"observer       {observer['samples']} samples of /proc, "
        f"at most {observer['longest_gap_s'] * 1000:.0f} ms apart"
        + (f", {len(observer['late'])} late: it may have missed something there" if observer["late"] else ""),
    ]
    why = failures(result, expected)
    text.append("ok" if result["ok"] else "NOT OK: " + "; ".join(why))
    return text


def _takeover(old: Term, new: Term, works: dict[int, dict[str, Any]]) -> dict[str, Any]:
    work = works.get(new.token, {})
    return {
        "from": old.node,
        "to": new.node,
        "token": new.token,
        "detected_s": round(new.since - old.renewed_at, 3),
        "work_s": work.get("work_s"),
        "steps": work.get("steps") or {},
    }
