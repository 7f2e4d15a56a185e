"""Who may command, what a request carries, and how it is refused."""

import asyncio
import json
from typing import TypeVar

from aiohttp import web
from pydantic import BaseModel, ConfigDict, ValidationError

from supervisor.api.unix import peer_of
from supervisor.node import Node

BODY = 2.0
"""Seconds for a request's body."""

M = TypeVar("M", bound=BaseModel)


class Body(BaseModel):
    """What a request may carry, and nothing else."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


def refusal(status: int, why: str) -> web.HTTPException:
    """An answer that is raised."""
    kinds: dict[int, type[web.HTTPException]] = {
        400: web.HTTPBadRequest,
        403: web.HTTPForbidden,
        404: web.HTTPNotFound,
        408: web.HTTPRequestTimeout,
        409: web.HTTPConflict,
        412: web.HTTPPreconditionFailed,
        503: web.HTTPServiceUnavailable,
    }
    return kinds[status](text=json.dumps({"error": why}), content_type="application/json")


def check_peer(request: web.Request, node: Node, elsewhere: str) -> None:
    """Commands come through the unix socket, from who may give them; `elsewhere` says so to the others."""
    transport = request.transport
    found = None if transport is None else peer_of(transport.get_extra_info("socket"))
    if found is None:
        raise refusal(403, elsewhere)
    if not found.may_command(node.config.admin_gid):
        group = node.config.admin_group
        members = "" if group is None else f" or a member of group {group}"
        raise refusal(403, f"uid {found.uid} may not do this: be root{members} (`admin_group`)")


async def no_body(request: web.Request) -> None:
    if await _body(request):
        raise refusal(400, "this request takes no body")


async def body(request: web.Request, kind: type[M]) -> M:
    """What the request carries, as JSON; where it carries nothing, what `kind` has by itself."""
    try:
        return kind.model_validate_json(await _body(request) or b"{}")
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the body"
        raise refusal(400, f"{where}: {first['msg']}") from None


async def _body(request: web.Request) -> bytes:
    try:
        async with asyncio.timeout(BODY):
            return await request.read()
    except TimeoutError:
        raise refusal(408, f"the body did not come within {BODY:g} s") from None
