"""What operators ask of the whole cluster, over HTTP: commanded through the unix socket only.

GET  /switchover     the request that stands in the store, and who leads
POST /switchover     {"target": NODE}: 202 once the request is written; `GET /switchover` tells what comes of it
POST /pause          {"because": TEXT}: nobody claims until /resume
POST /resume
POST /exclude        {"node": NODE, "because": TEXT}: it does not claim until /include
POST /include        {"node": NODE}

An error is `{"error": …}`: 400 wrong request, 403 not allowed, 404 no such member, 409 the state of the cluster
stands against it, 412 the target cannot lead, 503 the store gives no answer.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Annotated, TypeVar

from aiohttp import web
from pydantic import Field

from election import requests
from election.record import LONGEST_REASON
from election.requests import Change, RefusedError, Requests
from election.store import StoreError
from supervisor.api.access import Body, body, check_peer, no_body, refusal
from supervisor.api.status import settings_answer, switchover_now
from supervisor.config.values import NodeName
from supervisor.node import Node

ELSEWHERE = "not over TCP: use `gpuward` on one of the nodes"
ANSWER = 4.0
"""Seconds for the store, all calls of one request together."""
STATUS = {"unknown": 404, "conflict": 409, "precondition": 412}

T = TypeVar("T")
Because = Annotated[str, Field(max_length=LONGEST_REASON)]


class _Target(Body):
    target: NodeName


class _Reason(Body):
    because: Because = ""


class _Excluded(Body):
    node: NodeName
    because: Because = ""


class _Included(Body):
    node: NodeName


class ClusterRoutes:
    """The handlers of one node."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def add_to(self, app: web.Application) -> None:
        app.router.add_get("/switchover", self._look)
        app.router.add_post("/switchover", self._switch_over)
        for path, handler in (
            ("/pause", self._pause),
            ("/resume", self._resume),
            ("/exclude", self._exclude),
            ("/include", self._include),
        ):
            app.router.add_post(path, handler)

    @property
    def _requests(self) -> Requests:
        return self._node.requests

    async def _look(self, request: web.Request) -> web.Response:
        return web.json_response(switchover_now(self._node))

    async def _switch_over(self, request: web.Request) -> web.Response:
        self._check(request)
        target = (await body(request, _Target)).target
        asked = await self._answered(lambda deadline: self._requests.switch_over(target, deadline=deadline))
        self._node.note(f"an operator asked to switch over to {target}")
        message = f"asked the holder to pass the lock on to {target}"
        answer = {"node": self._node.config.node, "message": message, "switchover": asked.model_dump()}
        return web.json_response(answer, status=202)

    async def _pause(self, request: web.Request) -> web.Response:
        self._check(request)
        mark = self._requests.mark((await body(request, _Reason)).because)
        message = "paused: services run on, and nobody takes over until `gpuward resume`"
        return await self._change(lambda settings: requests.paused(settings, mark), message, "it is paused already")

    async def _resume(self, request: web.Request) -> web.Response:
        self._check(request)
        await no_body(request)
        return await self._change(requests.resumed, "resumed: fit nodes take over again", "it is not paused")

    async def _exclude(self, request: web.Request) -> web.Response:
        self._check(request)
        wanted = await body(request, _Excluded)
        node, mark = wanted.node, self._requests.mark(wanted.because)
        message, leader = f"{node} does not take over until `gpuward include {node}`", self._node.elector.leader()
        if leader == node:
            message += "; it leads now and goes on: `gpuward switchover NODE` passes the lock on"
        elif node not in (await self._answered(lambda deadline: self._requests.cluster(deadline=deadline))).members:
            message += "; it has no member record now, so look at its name again"
        already = f"{node} is excluded already"
        return await self._change(lambda settings: requests.excluded(settings, node, mark), message, already)

    async def _include(self, request: web.Request) -> web.Response:
        self._check(request)
        node = (await body(request, _Included)).node
        message, already = f"{node} may take over again, once it is fit", f"{node} is not excluded"
        return await self._change(lambda settings: requests.included(settings, node), message, already)

    def _check(self, request: web.Request) -> None:
        check_peer(request, self._node, ELSEWHERE)

    async def _change(self, change: Change, message: str, already: str) -> web.Response:
        changed, settings = await self._answered(lambda deadline: self._requests.change(change, deadline=deadline))
        if changed:
            self._node.note(f"an operator's word: {message}")
        answer = {"node": self._node.config.node, "changed": changed, "message": message if changed else already}
        return web.json_response(answer | settings_answer(settings))

    async def _answered(self, call: Callable[[float], Awaitable[T]]) -> T:
        deadline = self._node.clock.now() + ANSWER
        try:
            async with asyncio.timeout(ANSWER):
                return await call(deadline)
        except RefusedError as error:
            raise refusal(STATUS[error.kind], str(error)) from None
        except StoreError as error:
            done = "it may have been done or not" if error.sent else "nothing was changed"
            raise refusal(503, f"{done}, since the store gave no answer: {error}") from None
        except TimeoutError:
            why = f"the store gave no answer within {ANSWER:g} s"
            raise refusal(503, f"it may have been done or not, since {why}") from None
