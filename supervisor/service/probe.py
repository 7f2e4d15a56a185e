"""Looks from outside at whether a service is ready: does a port accept, does an HTTP server answer, is a model served?

A look never raises and never lasts longer than its patience; what it finds is a sentence, None when all is well.
"""

import asyncio
import json
from urllib.parse import urlsplit

import aiohttp

from supervisor.config.service import Liveness, Readiness
from supervisor.config.values import host_and_port

PATIENCE = 2.0
"""Seconds for a look at whether a service is ready."""
LARGEST = 1024 * 1024
"""Bytes of an answer that are read."""


async def look(at: Readiness | Liveness, patience: float = PATIENCE) -> str | None:
    """What is wrong with it, by `tcp` or `http`."""
    try:
        async with asyncio.timeout(patience):
            if at.tcp is not None:
                await _tcp(at.tcp)
                return None
            assert at.http is not None  # the schema has seen to it
            return await _http(at.http, at.model if isinstance(at, Readiness) else None)
    except TimeoutError:
        return f"no answer within {patience:g} s"
    except (OSError, aiohttp.ClientError, ValueError) as error:
        return getattr(error, "strerror", None) or str(error) or type(error).__name__


async def _tcp(address: str) -> None:
    host, port = host_and_port(address)
    _, writer = await asyncio.open_connection(host, port)
    writer.close()


async def _http(url: str, model: str | None) -> str | None:
    async with aiohttp.ClientSession() as session, session.get(url, allow_redirects=False) as answer:
        if answer.status // 100 != 2:
            return f"{urlsplit(url).path or '/'} says {answer.status}"
        if model is None:
            return None
        body = b""
        async for part in answer.content.iter_any():
            body += part
            if len(body) > LARGEST:
                return f"its answer is longer than {LARGEST} bytes"
    return missing_model(body, model)


def missing_model(body: bytes, model: str) -> str | None:
    """Whether an answer of /v1/models ({"data": [{"id": …}]}) has this model. Raises ValueError: it is none."""
    try:
        rows = json.loads(body)["data"]
        served = [str(row["id"]) for row in rows]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ValueError('the answer is no {"data": [{"id": …}]}') from None
    return None if model in served else f"model {model} is not served, but {', '.join(served[:5]) or 'none'}"
