"""`gpuward check-config`."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from election.timing import Timing
from supervisor.cli.exits import BAD_CONFIG
from supervisor.cli.output import console, plain
from supervisor.config import engines
from supervisor.config.loading import ConfigErrors, Problem, load, warnings
from supervisor.config.schema import Config
from supervisor.config.service import Service

TIMES = {
    "refresh": "the holder refreshes the lease, and retries until it gives up",
    "give_up": "gives up for good: SIGTERM to the services",
    "kill": "kills what is left",
    "switch": "the keeper's switch ends whatever still lives",
    "ttl": "the earliest moment at which another node may claim",
}
"""Moments of an election, in seconds after the last successful refresh was sent."""


def check(path: Path, *, as_json: bool) -> int:
    """Prints what the configuration says, or every problem of it; 0 or 78."""
    try:
        config = load(path)
        told = warnings(config) + _of_containers(path, config)
    except ConfigErrors as errors:
        if as_json:
            print(json.dumps({"ok": False, "problems": [asdict(problem) for problem in errors.problems]}))
        else:
            for problem in errors.problems:
                print(problem, file=sys.stderr)
        return BAD_CONFIG
    if as_json:
        print(json.dumps({"ok": True, **_report(config), "warnings": told}))
    else:
        _print(path, config, told)
    return 0


def _of_containers(path: Path, config: Config) -> list[str]:
    """Warnings of what their engines say now. Raises ConfigErrors where an engine is set up so that none can run."""
    found = engines.troubles(config)
    where = {name: f"services.{name}.container" for name in found}
    problems = [
        Problem(str(path), None, where[name], "an engine that cannot", "one that keeps it in its cgroup", trouble.why)
        for name, trouble in found.items()
        if trouble.lasting
    ]
    if problems:
        raise ConfigErrors(problems)
    return [f"{where[name]}: {trouble.why}: it fails until then" for name, trouble in found.items()]


def _report(config: Config) -> dict[str, Any]:
    timing = config.election.timing
    return {
        "cluster": config.cluster,
        "node": config.node,
        "store": config.election.store,
        "timing": {name: getattr(timing, name) for name in TIMES}
        | {"spent": round(timing.spent, 3), "available": round(timing.available, 3)},
        "services": {
            name: {"user": service.user, "gpu": service.gpu, "lock": service.lock, "priority": service.priority}
            for name, service in config.services.items()
        },
    }


def _print(path: Path, config: Config, told: list[str]) -> None:
    out = console()
    out.print(f"{path}: cluster {config.cluster}, node {config.node}, store {config.election.store}", markup=False)
    out.print(_timing_table(config.election.timing))
    out.print(Text(f"never two: {config.election.timing.sum()}"), soft_wrap=True)
    if config.services:
        out.print(_service_table(config.services))
    for warning in told:
        out.print(Text(f"warning: {plain(warning)}", style="yellow"), soft_wrap=True)
    out.print("the configuration is valid", style="green")


def _timing_table(timing: Timing) -> Table:
    table = Table("seconds", "after the last refresh", box=box.SIMPLE)
    table.columns[0].justify = "right"
    for name, meaning in TIMES.items():
        table.add_row(f"{getattr(timing, name):.4g}", meaning)
    return table


def _service_table(services: dict[str, Service]) -> Table:
    table = Table("service", "user", "gpu", "lock", "program", box=box.SIMPLE)
    for name, service in services.items():
        gpu = "–" if service.gpu is None else str(service.gpu)
        table.add_row(name, str(service.user), gpu, service.lock or "–", Text(plain(service.program)))
    return table
