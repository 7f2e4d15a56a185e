"""`gpuward status`: asks a node for its /status and shows it."""

import http.client
import json
from pathlib import Path

from rich import box
from rich.table import Table
from rich.text import Text

from supervisor.cli.exits import NO_DAEMON, fail, reach_or_exit
from supervisor.cli.local import Answer, Daemon
from supervisor.cli.output import console, plain, span
from supervisor.config.values import split_url

TIMEOUT = 2.0
"""Seconds, for the connection and for each piece of the answer."""
MAX_ANSWER = 8 * 1024 * 1024
LAST_EVENTS = 8
STYLES = {
    "running": "green",
    "starting": "cyan",
    "waiting-lock": "cyan",
    "backoff": "yellow",
    "unready": "yellow",
    "degraded": "red",
    "quarantined": "red",
}
"""Colours of service states."""


def show(path: Path, url: str | None, run_dir: Path | None, *, as_json: bool) -> int:
    """Prints the status; 0, or exit 69 where no daemon answers."""
    answer = ask(path, url, run_dir)
    if as_json:
        print(json.dumps(answer, indent=2))
    else:
        _print(answer)
    return 0


def ask(path: Path, url: str | None, run_dir: Path | None) -> Answer:
    """What /status says at `url`, else through the socket in `run_dir`, else where the configuration says that the
    daemon listens. Ends the command where none answers."""
    if url is None and run_dir is not None:
        return Daemon(run_dir).ask("GET", "/status")
    asked = (f"http://{reach_or_exit(path).api.listen}" if url is None else url).rstrip("/")
    try:
        return fetch(asked)
    except (OSError, http.client.HTTPException, ValueError) as error:
        fail(f"no daemon answers at {plain(asked)}: {plain(reason(error))}", NO_DAEMON)


def reason(error: Exception) -> str:
    """Why there is no answer, in a few words."""
    if isinstance(error, TimeoutError):
        return f"no answer within {TIMEOUT:g} s"
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def fetch(url: str) -> Answer:
    """What /status of the node says. `OSError`, `HTTPException` or `ValueError` where that is no status."""
    parts = split_url(url)
    if parts is None or parts.hostname is None or "@" in url:
        raise ValueError("expected a URL such as http://127.0.0.1:8009")
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname, parts.port, timeout=TIMEOUT)
    try:
        connection.request("GET", f"{parts.path}/status", headers={"Accept": "application/json"})
        with connection.getresponse() as response:
            body = response.read(MAX_ANSWER)
    finally:
        connection.close()
    if response.status != 200:
        raise ValueError(f"it said {response.status} to GET {parts.path}/status, so it is not gpuward")
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError):
        answer = None
    if not isinstance(answer, dict) or "role" not in answer:
        raise ValueError("what answers there is not gpuward")
    return answer


def _print(answer: Answer) -> None:
    out = console()
    out.print(_headline(answer), soft_wrap=True)
    for line in _about_node(answer):
        out.print(line, soft_wrap=True)
    if answer.get("gpus"):
        out.print(_gpu_table(answer["gpus"]))
    if answer.get("services"):
        out.print(service_table(answer["services"]))
    for alarm in answer.get("alarms") or []:
        out.print(Text(f"alarm {plain(alarm.get('at'))}  {plain(alarm.get('text'))}", style="red"), soft_wrap=True)
    for event in (answer.get("events") or [])[-LAST_EVENTS:]:
        out.print(Text(f"{plain(event.get('at'))}  {plain(event.get('what'))}", style="dim"), soft_wrap=True)


def _headline(answer: Answer) -> Text:
    """The cluster in one line: who leads, with which token, how long the lease still lasts."""
    text = Text(f"{plain(answer.get('cluster'))}: ", style="bold")
    leader, term = answer.get("leader"), answer.get("term")
    if term:
        text.append(f"{plain(answer.get('node'))} leads, token {plain(term.get('token'))}", style="green")
        return text.append(f", lease left {span(term.get('lease_left_s'))} of {span(answer.get('ttl_s'))}")
    seen, ttl = (leader or {}).get("seen_s_ago"), answer.get("ttl_s")
    if leader and isinstance(seen, int | float) and isinstance(ttl, int | float) and seen > ttl:
        text.append(f"who leads is not known, the store has not answered for {span(seen)}", style="red")
        return text.append(f"; {plain(leader.get('node'))} led then, with token {plain(leader.get('token'))}")
    if leader:
        text.append(f"{plain(leader.get('node'))} leads, token {plain(leader.get('token'))}", style="green")
        return text.append(f", {plain(leader.get('state'))}, seen {span(leader.get('seen_s_ago'))} ago")
    return text.append("no leader", style="red")


def _about_node(answer: Answer) -> list[Text]:
    role, state = plain(answer.get("role")), answer.get("state")
    style = {"leader": "green", "unfit": "red"}.get(role, "")
    line = Text(f"this node {plain(answer.get('node'))}: ").append(role, style=style)
    line.append(f" ({plain(state)})" if state else "").append(f": {plain(answer['why'])}" if answer.get("why") else "")
    lines = [line, *(Text(f"  unfit: {plain(why)}", style="red") for why in answer.get("unfit_because") or [])]
    lines += [Text(f"  {text}", style="yellow") for text in _operators_words(answer)]
    keeper = answer.get("keeper")
    about = f"pid {plain(keeper.get('pid'))}" if keeper else "not running"
    lines.append(Text(f"  keeper {about}, containment {plain(answer.get('containment'))}"))
    return lines


def _operators_words(answer: Answer) -> list[str]:
    """What operators have asked of the cluster."""
    excluded = (answer.get("excluded") or {}).items()
    words = [("paused", answer.get("paused") or {}), *((f"{name} is excluded", mark) for name, mark in excluded)]
    lines = []
    for what, mark in words:
        if not mark:
            continue
        because = f" ({plain(mark['because'])})" if mark.get("because") else ""
        lines.append(f"{plain(what)} since {plain(mark.get('since'))}, asked for on {plain(mark.get('on'))}{because}")
    if asked := answer.get("switchover"):
        refused = f": refused, {plain(asked['refused'])}" if asked.get("refused") else " is under way"
        lines.append(f"a switchover to {plain(asked.get('target'))}{refused}")
    return lines


def _gpu_table(gpus: list[Answer]) -> Table:
    table = Table("gpu", "state", "lock held by", "pid", "for", "lock file", box=box.SIMPLE)
    for gpu in gpus:
        lock = gpu.get("lock") or {}
        holder = lock.get("holder") or {}
        held_by = plain(holder.get("service")) if holder else "free"
        held_for = span(holder.get("held_s")) if holder else ""
        cells = [gpu.get("index"), gpu.get("state"), held_by, holder.get("pid"), held_for, lock.get("path")]
        table.add_row(*(Text(plain(cell)) for cell in cells))
    return table


def service_table(services: list[Answer]) -> Table:
    """One line for each."""
    table = Table("service", "state", "for", "pid", "restarts", "gpu", "why / next", box=box.SIMPLE)
    for service in services:
        state, following = plain(service.get("state")), service.get("next_s")
        why = plain(service.get("why") or "") + (f"; next in {span(following)}" if following is not None else "")
        table.add_row(
            Text(plain(service.get("name"))),
            Text(state, style=STYLES.get(state, "")),
            span(service.get("for_s")),
            *(Text(plain(service.get(key))) for key in ("pid", "restarts", "gpu")),
            Text(why.removeprefix("; ")),
        )
    return table
