"""`gpuward switchover|pause|resume|exclude|include`: operators' words to the cluster, through any node."""

import json
import sys
import time
from typing import Any

from supervisor.cli.exits import NOT_NOW
from supervisor.cli.local import Answer, Daemon
from supervisor.cli.output import plain, span

POLL = 0.2
"""Seconds between looks of --wait."""


def ask(daemon: Daemon, word: str, body: dict[str, Any] | None, *, as_json: bool) -> int:
    """One word; says what came of it."""
    _say(daemon.ask("POST", f"/{word}", body=body), as_json=as_json)
    return 0


def switch_over(daemon: Daemon, target: str, *, wait: float | None, as_json: bool) -> int:
    """Asks for it, and with `wait` (seconds) returns when it is done: 0; 75 where the holder refused, 1 where it is not
    done in time or another node leads."""
    answer = daemon.ask("POST", "/switchover", body={"target": target})
    if wait is None:
        _say(answer, as_json=as_json)
        return 0
    print(plain(answer["message"]), file=sys.stderr)
    code, message = _wait(daemon, target, answer["switchover"], wait)
    _say(daemon.ask("GET", "/switchover") | {"message": message}, as_json=as_json)
    return code


def _wait(daemon: Daemon, target: str, asked: dict[str, Any], seconds: float) -> tuple[int, str]:
    began = time.monotonic()
    while (passed := time.monotonic() - began) < seconds:
        now = daemon.ask("GET", "/switchover")
        leader, standing = now.get("leader") or {}, now.get("switchover") or {}
        if standing.get("refused") and standing == asked | {
            "refused": standing["refused"]
        }:  # an older one may be shown
            return NOT_NOW, f"refused: {standing['refused']}"
        if leader.get("state") == "active" and leader.get("instance") != asked["instance"]:
            if leader.get("node") == target:
                return 0, f"{target} leads with token {leader.get('token')}, {passed:.1f} s after it was asked for"
            return 1, f"{leader.get('node')} leads in its place: see `gpuward status` on {target}"
        time.sleep(POLL)
    return 1, f"not done after {span(seconds)}; it goes on"


def _say(answer: Answer, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(answer, indent=2))
    else:
        print(plain(answer["message"]))
