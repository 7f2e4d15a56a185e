"""Looks from outside at whether a service is ready: does a port accept, does an HTTP server answer, is a model served?

A look never raises and never lasts longer than PATIENCE; what it finds is a sentence, None when all is well.
"""

import asyncio
import json
from urllib.parse import urlsplit

import aiohttp

from supervisor.config.schema import Readiness
from supervisor.config.values import host_and_port

EVERY = 2.0
"""Seconds between looks."""
PATIENCE = 2.0
"""Seconds for one look."""
LARGEST = 1024 * 1024
"""Bytes of an answer that are read."""


async def look(readiness: Readiness) -> str | None:
    """What is missing for it to be ready."""
    try:
        async with asyncio.timeout(PATIENCE):
            if readiness.tcp is not None:
                await _tcp(readiness.tcp)
                return None
            assert readiness.http is not None  # the schema has seen to it
            return await _http(readiness.http, readiness.model)
    except TimeoutError:
        return f"no answer within {PATIENCE:g} s"
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
