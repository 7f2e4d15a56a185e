"""The HTTP endpoints. The role is computed from the deadline at the moment of the request, never from a flag.

/leader (alias /primary)   200 only while this node holds the lock *and* is active, else 503
/standby                   200 while it stands by and could lead, else 503
/health                    200 while its local work is fine: fit, or leading with every service up
/liveness                  200 while its loop turns
/status                    everything, as JSON
/switchover, /pause, …     operators' words to the cluster, see supervisor.api.cluster
/services                  one by one, and what an operator asks of them, see supervisor.api.services
"""

from collections.abc import Awaitable, Callable

from aiohttp import web

from election.timing import LIFE
from supervisor.api.cluster import ClusterRoutes
from supervisor.api.services import ServiceRoutes
from supervisor.api.status import status
from supervisor.node import Node

NODE: web.AppKey[Node] = web.AppKey("node", Node)
WELL = {"running", "starting", "waiting-lock"}
"""States of a service with which the node's local work is fine."""


def make_app(node: Node) -> web.Application:
    """GET, HEAD and OPTIONS for load balancers; commands for operators."""
    app = web.Application(client_max_size=1024)
    app[NODE] = node
    for path, check in CHECKS.items():
        app.router.add_get(path, _answer(check))
        app.router.add_route("OPTIONS", path, _answer(check))
    app.router.add_get("/status", _status)
    ServiceRoutes(node).add_to(app)
    ClusterRoutes(node).add_to(app)
    return app


def leads(node: Node) -> str:
    """Empty while it does, else why not."""
    return "" if node.elector.leads() else f"{node.config.node} does not lead"


def stands_by(node: Node) -> str:
    role = node.role()
    return "" if role == "standby" else f"{node.config.node} is {role}"


def healthy(node: Node) -> str:
    """Empty while local work is fine."""
    if not node.has_term():
        return "; ".join(node.unfit_because())
    ill = [f"{row['name']} is {row['state']}" for row in node.services.snapshot() if row["state"] not in WELL]
    return "; ".join(ill)


def lives(node: Node) -> str:
    """This answer comes out of the loop itself; the watchdog and the service monitor must turn too."""
    now = node.clock.now()
    return "" if node.alive(now) else f"a part of the supervisor has shown no life for more than {LIFE:g} s"


CHECKS: dict[str, Callable[[Node], str]] = {
    "/leader": leads,
    "/primary": leads,
    "/standby": stands_by,
    "/health": healthy,
    "/liveness": lives,
}


def _answer(check: Callable[[Node], str]) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def handler(request: web.Request) -> web.Response:
        node = request.app[NODE]
        why_not = check(node)
        body = {"node": node.config.node, "role": node.role(), "ok": not why_not, "why": why_not}
        return web.json_response(body, status=503 if why_not else 200)

    return handler


async def _status(request: web.Request) -> web.Response:
    return web.json_response(status(request.app[NODE]))
