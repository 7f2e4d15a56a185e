"""`gpuward service`: one service of this node looked at, started, stopped; through the daemon alone."""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

from rich.text import Text

from supervisor.cli.exits import NOT_RUNNING, UNKNOWN, fail
from supervisor.cli.local import Answer, Daemon
from supervisor.cli.output import console, plain, span
from supervisor.cli.status import service_table

UP = {"running", "unready", "draining"}
"""States of a service that has come up."""
LOST = {"degraded", "quarantined", "stopped"}
"""States out of which a service that was to start does not come by itself."""
POLL = 0.2
"""Seconds between looks of --wait."""
LAST_LINES = 10
"""Shown of a service's log, as systemctl status does."""
FOLLOW = 0.5
"""Seconds between looks of logs -f."""


def find(config: Path, run_dir: Path | None) -> Daemon:
    """The daemon by its run folder, which the configuration names unless it is given."""
    if run_dir is None:
        from supervisor.cli.exits import reach_or_exit

        run_dir = reach_or_exit(config).paths.run
    return Daemon(run_dir)


def show_all(daemon: Daemon, *, as_json: bool) -> int:
    answer = daemon.ask("GET", "/services")
    if as_json:
        print(json.dumps(answer, indent=2))
    else:
        console().print(service_table(answer["services"]))
    return 0


def show(daemon: Daemon, name: str, *, as_json: bool) -> int:
    """0 if it is up, else 3."""
    answer = _look(daemon, name)
    answer["last_lines"] = _last_lines(daemon, name)
    _print(answer, as_json=as_json)
    if not as_json:
        _print_lines(answer["last_lines"])
    return 0 if answer["service"]["state"] in UP else NOT_RUNNING


def command(daemon: Daemon, name: str, verb: str, *, wait: float | None, as_json: bool) -> int:
    """Asks for it, and with `wait` (seconds) returns when it is done: 0, or 3 where it did not come to that."""
    answer = daemon.ask("POST", f"{_path(name)}/{verb}")
    print(plain(answer["message"]), file=sys.stderr if as_json else sys.stdout)
    code = 0
    if wait is not None:
        answer, code = _wait(daemon, name, answer, verb, wait)
    if as_json:
        print(json.dumps(answer, indent=2))
    elif wait is not None:
        print(_sentence(answer["service"]))
        if code == NOT_RUNNING:
            _print_lines(_last_lines(daemon, name))
    return code


def _wait(daemon: Daemon, name: str, answer: Answer, verb: str, seconds: float) -> tuple[Answer, int]:
    end = time.monotonic() + seconds
    done, lost = ({"stopped"}, {"quarantined"}) if verb in ("stop", "drain") else (UP, LOST)
    while answer["service"]["state"] not in done | lost and time.monotonic() < end:
        time.sleep(POLL)
        answer = _look(daemon, name)
    if answer["service"]["state"] in done:
        return answer, 0
    if answer["service"]["state"] not in lost:
        print(f"gpuward: not done after {span(seconds)}; it goes on", file=sys.stderr)
    return answer, 1 if verb in ("stop", "drain") else NOT_RUNNING


def _last_lines(daemon: Daemon, name: str) -> list[str]:
    """Why it did not start is mostly there; none where its log cannot be read."""
    answer = daemon.ask("GET", f"{_path(name)}/logs?lines={LAST_LINES}", optional=True)
    return [*answer.get("lines", []), *filter(None, [answer.get("unfinished")])]


def logs(daemon: Daemon, name: str, lines: int, *, sidecar: str | None, follow: bool, as_json: bool) -> int:
    """The last lines; `follow`: and those that come, until Ctrl-C."""
    of = "" if sidecar is None else f"&sidecar={quote(sidecar, safe='')}"
    try:
        answer = daemon.ask("GET", f"{_path(name)}/logs?lines={lines}{of}")
        if as_json:
            print(json.dumps(answer, indent=2))
            return 0
        unfinished = [] if follow or not answer["unfinished"] else [answer["unfinished"]]
        _print_lines([*answer["lines"], *unfinished])
        while follow:
            time.sleep(FOLLOW)
            answer = daemon.ask("GET", f"{_path(name)}/logs?after={answer['place']}{of}")
            if answer["cut"]:
                why = "more came than is shown, or a part of the log is gone"
                print(f"gpuward: some lines are missing here: {why}", file=sys.stderr)
            _print_lines(answer["lines"])
    except KeyboardInterrupt:
        return 0
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left in the buffer has nowhere to go
    return 0


def _print_lines(lines: list[str]) -> None:
    """On a terminal without what could move the cursor; as they are through a pipe."""
    terminal = sys.stdout.isatty()
    for line in lines:
        print(plain(line.expandtabs()) if terminal else line)
    sys.stdout.flush()


def _look(daemon: Daemon, name: str) -> Answer:
    return daemon.ask("GET", _path(name))


def _path(name: str) -> str:
    if not name or name in (".", ".."):
        fail(f"{name!r} is not the name of a service", UNKNOWN)
    return f"/services/{quote(name, safe='')}"


def _print(answer: Answer, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(answer, indent=2))
        return
    out, row = console(), answer["service"]
    out.print(Text(_sentence(row)), soft_wrap=True)
    for key in ("pid", "restarts", "failures", "gpu", "lock"):
        out.print(Text(f"  {key:<9} {plain(row.get(key))}"), soft_wrap=True)
    for sidecar in row.get("sidecars") or []:
        text = (
            f"  sidecar   {plain(sidecar.get('name'))}: {plain(sidecar.get('state'))}, pid {plain(sidecar.get('pid'))}"
        )
        out.print(Text(text), soft_wrap=True)


def _sentence(row: dict[str, Any]) -> str:
    """State, for how long, why, and what happens next."""
    following = row.get("next_s")
    after = "" if following is None else f"; next in {span(following)}"
    state = f"{plain(row.get('name'))}: {plain(row.get('state'))} for {span(row.get('for_s'))}"
    return f"{state}: {plain(row.get('why'))}{after}"
