"""`gpuward lock list`: who has the lock of each GPU of this node, for how long, and who waits for it in which order."""

import json
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from election.record import timestamp
from supervisor.cli.local import Answer
from supervisor.cli.output import console, plain, span
from supervisor.cli.status import ask

ABOUT_HOLDER = ("service", "pid", "since", "token")


def show(path: Path, run_dir: Path | None, *, as_json: bool) -> int:
    """Prints the locks; 0, or exit 69 where no daemon answers."""
    rows = locks(ask(path, None, run_dir))
    if as_json:
        print(json.dumps(rows, indent=2))
    else:
        _print(rows)
    return 0


def locks(answer: Answer) -> list[Answer]:
    """One row a GPU of what /status says."""
    return [_row(gpu) for gpu in answer.get("gpus") or []]


def _row(gpu: Answer) -> Answer:
    lock = gpu.get("lock") or {}
    holder = lock.get("holder")
    return {
        "gpu": gpu.get("index"),
        "path": lock.get("path"),
        "holder": {key: holder.get(key) for key in ABOUT_HOLDER} if holder else None,
        "held_s": holder.get("held_s") if holder else None,
        "waiting": lock.get("waiting") or [],
    }


def _print(rows: list[Answer]) -> None:
    table = Table("gpu", "held by", "pid", "token", "since", "held for", "waiting, the next one first", "lock file")
    table.box = box.SIMPLE
    for row in rows:
        holder = row["holder"] or {}
        held_by = plain(holder.get("service")) if holder else "free"
        since, waiting = _when(holder.get("since")), ", ".join(map(plain, row["waiting"])) or None
        cells: list[Any] = [row["gpu"], held_by, holder.get("pid"), holder.get("token"), since]
        cells += [span(row["held_s"]), waiting, row["path"]]
        table.add_row(*(Text(plain(cell)) for cell in cells))
    console().print(table)


def _when(since: object) -> str | None:
    """Unix time as people read it."""
    if isinstance(since, int | float) and abs(since) < 1e11:
        return timestamp(since)
    return None if since is None else str(since)
