"""Services over HTTP: read by anybody, commanded through the unix socket only.

GET  /services               all of them
GET  /services/NAME          one
GET  /services/NAME/logs     ?lines=N: the end of its log file; ?after=PLACE: what came since (`place` of an answer);
                             &sidecar=NAME: of a sidecar's
POST /services/NAME/VERB     start, stop, restart, reset: 202 with its state

A log file is as private as its mode on the disk (0640): like commands it needs the unix socket and the right peer.
An error is `{"error": …}`: 400 wrong request, 403 not allowed, 404 unknown, 409 not now, 503 the disk does not answer.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aiohttp import web

from supervisor.api.access import check_peer, no_body, refusal
from supervisor.api.logs import MOST_LINES, Piece, Place, last_lines, lines_after
from supervisor.api.status import state_and_why
from supervisor.gpu.aside import Aside, StillStuckError
from supervisor.node import Node
from supervisor.service.order import sidecar_log
from supervisor.service.requests import Act, Refused, Verb

ON_THE_NODE = "not over TCP: use `gpuward service` on the node itself"
LINES = 20
"""Of a log, where nothing else is asked for."""
DISK = 1.0
"""Seconds for the disk to give a piece of a log."""


class ServiceRoutes:
    """The handlers of one node."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._disk = Aside("log-reader")

    def add_to(self, app: web.Application) -> None:
        app.router.add_get("/services", self._list)
        app.router.add_get("/services/{name}", self._one)
        app.router.add_get("/services/{name}/logs", self._logs)
        app.router.add_post(f"/services/{{name}}/{{verb:{'|'.join(Verb)}}}", self._command)

    async def _list(self, request: web.Request) -> web.Response:
        return web.json_response(self._about() | {"services": self._node.services.snapshot()})

    async def _one(self, request: web.Request) -> web.Response:
        return web.json_response(self._about() | {"service": self._row(self._name(request))})

    async def _command(self, request: web.Request) -> web.Response:
        check_peer(request, self._node, ON_THE_NODE)
        name, verb = self._name(request), Verb(request.match_info["verb"])
        await no_body(request)
        decision = await self._node.services.request(name, verb, no_start=self._no_start())
        if isinstance(decision, Refused):
            raise refusal(409, f"{name} cannot {verb} now: {decision.why}")
        done = isinstance(decision, Act)
        message = decision.value if isinstance(decision, Act) else decision.why
        answer = self._about() | {"service": self._row(name), "changed": done, "message": f"{name}: {message}"}
        return web.json_response(answer, status=202)

    async def _logs(self, request: web.Request) -> web.Response:
        check_peer(request, self._node, ON_THE_NODE)
        name = self._name(request)
        path = self._log(name, request.query.get("sidecar"))
        read = _reader(path, request.query.get("lines"), request.query.get("after"))

        def answer() -> bytes:
            piece = read()
            body = {"lines": piece.lines, "unfinished": piece.unfinished, "cut": piece.cut, "place": str(piece.place)}
            return json.dumps({"node": self._node.config.node, "service": name} | body).encode()

        try:
            body = await self._disk.read(answer, deadline=self._node.clock.now() + DISK)
        except StillStuckError:
            raise refusal(503, f"the log of {name} could not be read within {DISK:g} s") from None
        except OSError as error:
            raise refusal(503, f"the log of {name} cannot be read: {error.strerror or error}") from None
        return web.Response(body=body, content_type="application/json")

    def _log(self, name: str, sidecar: str | None) -> Path:
        folder = self._node.config.paths.log
        if sidecar is None:
            return folder / f"{name}.log"
        sidecars = self._node.config.services[name].sidecars
        if sidecar not in sidecars:
            raise refusal(404, f"{name} has no sidecar of this name; it has: {', '.join(sidecars) or 'none'}")
        return sidecar_log(folder, name, sidecar)

    def _about(self) -> dict[str, Any]:
        return {"node": self._node.config.node, "role": self._node.role()}

    def _name(self, request: web.Request) -> str:
        name = request.match_info["name"]
        runners = self._node.services.runners
        if name not in runners:
            raise refusal(
                404, f"{self._node.config.node} has no service of this name; it has: {', '.join(runners) or 'none'}"
            )
        return name

    def _row(self, name: str) -> dict[str, Any]:
        return next(row for row in self._node.services.snapshot() if row["name"] == name)

    def _no_start(self) -> str:
        """Why nothing may be started on this node now."""
        node = self._node
        return "" if node.elector.leads() else f"{node.config.node} does not lead: {state_and_why(node)[1]}"


def _reader(path: Path, lines: str | None, after: str | None) -> Callable[[], Piece]:
    if after is not None:
        try:
            place = Place.parse(after)
        except ValueError:
            raise refusal(400, "`after` is the `place` of an earlier answer") from None
        return lambda: lines_after(path, place)
    text = str(LINES) if lines is None else lines
    if not (text.isascii() and text.isdecimal() and len(text) < 5 and 1 <= int(text) <= MOST_LINES):
        raise refusal(400, f"`lines` is a number from 1 to {MOST_LINES}")
    return lambda: last_lines(path, int(text))
