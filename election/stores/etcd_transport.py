"""Requests to etcd's JSON gateway, one endpoint at a time: every way to fail becomes one exception.

Nothing of aiohttp comes out of here. Redirects are not followed, proxies and cookies not used. Where there is a user,
each request carries its token; one that etcd no longer takes is replaced, within the deadline of the call.
"""

import asyncio
import json
import re
import ssl
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import aiohttp

from election.clock import Clock
from election.store import ErrorClass
from election.stores.etcd_access import Access, AccessError, Certificates
from election.stores.etcd_errors import COMMON_NAME, NOT_FOUND, OLD_TOKEN, another_may_know, classify
from election.stores.etcd_wire import MalformedError, document, number, part

LARGEST_REPLY = 16 << 20
"""Bytes. Ours are a few kB; more is not etcd talking."""
GATEWAY_OFF = "no JSON gateway here (404); etcd's clients use port 2379, and 2380 is for its members alone"

_FAILURES = (AccessError, aiohttp.ClientError, OSError, ValueError, RuntimeError, EOFError)


class RefusedError(Exception):
    """One attempt at one endpoint failed."""

    def __init__(self, kind: ErrorClass, cause: str, *, sent: bool = True, elsewhere: bool = False) -> None:
        super().__init__(cause)
        self.kind = kind
        self.token_ended = kind is ErrorClass.AUTH and any(text in cause for text in OLD_TOKEN)
        self.sent = sent
        """False: the request never left."""
        self.elsewhere = elsewhere
        """It is this endpoint's trouble: another one may well answer at once."""


@dataclass
class _Progress:
    connected: bool = False


class Messages:
    """The answer to a streaming request: JSON documents, one a line."""

    def __init__(self, response: aiohttp.ClientResponse, clock: Clock) -> None:
        self._response = response
        self._clock = clock
        self._buffer = bytearray()

    async def next(self, deadline: float) -> dict[str, Any]:
        """The next message. Raises `RefusedError`, or `TimeoutError` where none has come by `deadline`."""
        async with asyncio.timeout(deadline - self._clock.now()):
            while (end := self._buffer.find(b"\n")) < 0:
                await self._more()
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        return interpret(self._response.status, line)

    async def _more(self) -> None:
        try:
            data = await self._response.content.readany()
        except TimeoutError:
            raise
        except _FAILURES as error:
            raise RefusedError(ErrorClass.TRANSIENT, f"the stream broke: {describe(error)}", elsewhere=True) from error
        if not data and not self._buffer:
            raise RefusedError(ErrorClass.TRANSIENT, "the stream ended", elsewhere=True)
        self._buffer += data or b"\n"
        if len(self._buffer) > LARGEST_REPLY:
            raise RefusedError(ErrorClass.TRANSIENT, f"a message of more than {LARGEST_REPLY} bytes", elsewhere=True)


class Transport:
    """A session with several endpoints, and which of them is in use. Belongs to one event loop."""

    def __init__(self, endpoints: Sequence[str], clock: Clock, access: Access) -> None:
        self.endpoints = tuple(endpoints)
        self.clock = clock
        self.current = 0
        self.revision = 0
        """Of the store, by the latest answer that tells one: what a watch could have missed shows by it."""
        self.closed = False
        self._access, self._certificates = access, Certificates(access)
        self._token: str | None = None
        self._session: aiohttp.ClientSession | None = None
        self._streams: set[aiohttp.ClientResponse] = set()

    def after(self, index: int) -> int:
        return (index + 1) % len(self.endpoints)

    def leave(self, index: int) -> None:
        """The next call goes elsewhere, unless it would already."""
        if self.current == index:
            self.current = self.after(index)

    async def ask(self, index: int, path: str, body: Mapping[str, Any], deadline: float) -> dict[str, Any]:
        """One request, one answer; by `deadline` (boot-time seconds), else `RefusedError`."""
        token = await self._authenticated(index, deadline)
        try:
            return await self._ask(index, path, body, deadline, token)
        except RefusedError as refused:
            if not self.forget(token, refused):
                raise
        return await self._ask(index, path, body, deadline, await self._authenticated(index, deadline))

    def forget(self, token: str | None, refused: RefusedError) -> bool:
        """Was it refused for its token, so that the next request will bring another one?"""
        if token is None or not refused.token_ended:
            return False
        if self._token == token:
            self._token = None
        return True

    async def _authenticated(self, index: int, deadline: float) -> str | None:
        """The token of our user, asked for where there is none; None without a user."""
        user = self._access.user
        if user is None or self._token is not None:
            return self._token
        what = f"authentication of etcd user {user!r}"
        try:
            body = {"name": user, "password": self._access.password()}
            answer = await self._ask(index, "/v3/auth/authenticate", body, deadline, None)
        except AccessError as error:
            raise RefusedError(ErrorClass.AUTH, f"{what}: {error}", sent=False) from None
        except RefusedError as error:
            raise RefusedError(error.kind, f"{what}: {error}", sent=False, elsewhere=error.elsewhere) from None
        token = answer.get("token")
        if not isinstance(token, str) or not token.isascii() or not token.isprintable() or not token:
            raise RefusedError(ErrorClass.TRANSIENT, f"{what}: an answer without token", sent=False, elsewhere=True)
        self._token = token
        return token

    async def _ask(
        self, index: int, path: str, body: Mapping[str, Any], deadline: float, token: str | None
    ) -> dict[str, Any]:
        progress = _Progress()
        try:
            async with (
                asyncio.timeout(deadline - self.clock.now()),
                self._post(index, path, body, progress, token) as response,
            ):
                raw = await _whole(response)
        except TimeoutError as error:
            what = "no answer by the deadline" if progress.connected else "no connection by the deadline"
            raise RefusedError(ErrorClass.TRANSIENT, what, sent=progress.connected) from error
        except _FAILURES as error:
            raise _broken(error, progress) from error
        answer = interpret(response.status, raw, response.headers.get("Location"))
        self.revision = revision_of(answer) or self.revision
        return answer

    @asynccontextmanager
    async def stream(self, index: int, path: str, body: Mapping[str, Any], deadline: float) -> AsyncIterator[Messages]:
        """One request, many answers; the first headers by `deadline`, else `RefusedError`."""
        progress, token = _Progress(), await self._authenticated(index, deadline)
        try:
            request = self._post(index, path, body, progress, token)
            async with asyncio.timeout(deadline - self.clock.now()):
                response = await request
        except TimeoutError as error:
            raise RefusedError(ErrorClass.TRANSIENT, "no answer by the deadline", sent=progress.connected) from error
        except _FAILURES as error:
            raise _broken(error, progress) from error
        self._streams.add(response)
        try:
            yield Messages(response, self.clock)
        except RefusedError as refused:
            self.forget(token, refused)
            raise
        finally:
            self._streams.discard(response)
            response.close()

    async def close(self) -> None:
        """Whoever waits for an answer is told at once: aiohttp by itself would leave a reader of a stream waiting."""
        self.closed = True
        for response in self._streams:
            response.content.set_exception(RuntimeError("this store was closed"))
        if self._session is not None:
            await self._session.close()

    def _post(self, index: int, path: str, body: Mapping[str, Any], progress: _Progress, token: str | None) -> Any:
        if self.closed:
            raise RuntimeError("this store was closed")
        if self._session is None:
            self._session = _new_session()
        endpoint = self.endpoints[index]
        # A stream ends when its member has lost the leader (etcd rpctypes MetadataRequireLeaderKey).
        headers = {"Content-Type": "application/json", "Grpc-Metadata-hasleader": "true"}
        return self._session.post(
            endpoint + path,
            data=json.dumps(body).encode(),
            headers=headers if token is None else {**headers, "Authorization": token},
            ssl=self._certificates.context() if endpoint.startswith("https:") else False,
            allow_redirects=False,
            trace_request_ctx=progress,
        )


def _new_session() -> aiohttp.ClientSession:
    async def connected(_session: aiohttp.ClientSession, context: SimpleNamespace, _event: object) -> None:
        context.trace_request_ctx.connected = True

    trace = aiohttp.TraceConfig()
    trace.on_connection_create_end.append(connected)
    trace.on_connection_reuseconn.append(connected)
    return aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=None, sock_read=None),
        cookie_jar=aiohttp.DummyCookieJar(),
        trace_configs=[trace],
    )


async def _whole(response: aiohttp.ClientResponse) -> bytes:
    raw = bytearray()
    async for data in response.content.iter_any():
        raw += data
        if len(raw) > LARGEST_REPLY:
            raise ValueError(f"an answer of more than {LARGEST_REPLY} bytes")
    return bytes(raw)


def describe(error: BaseException) -> str:
    text = re.sub(r" ssl:(<.*?>|\w+)", "", str(error))  # aiohttp's word, for http as well
    return text.replace("[None]", "[closed in the TLS handshake]") or type(error).__name__


def _broken(error: Exception, progress: _Progress) -> RefusedError:
    if isinstance(error, AccessError):
        return RefusedError(ErrorClass.AUTH, str(error), sent=False)
    what = "the connection broke before the answer" if progress.connected else "no connection"
    sent, kind = progress.connected, ErrorClass.AUTH if _is_of_tls(error) else ErrorClass.TRANSIENT
    return RefusedError(kind, f"{what}: {describe(error)}", sent=sent, elsewhere=True)


def _is_of_tls(error: BaseException | None) -> bool:
    """Is TLS refused, by us or by the other side? A connection that broke is no refusal."""
    if isinstance(error, ssl.SSLError):
        return not isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError | ssl.SSLSyscallError)
    return error is not None and _is_of_tls(error.__cause__)


def revision_of(answer: Mapping[str, Any]) -> int:
    """The store's revision in an answer; 0 where it tells none."""
    try:
        return number(part(part(answer, "result") or answer, "header"), "revision")
    except MalformedError:
        return 0


def interpret(status: int, raw: bytes, location: str | None = None) -> dict[str, Any]:
    """The document that an answer carries; an error in any of etcd's forms, or nonsense, raises `RefusedError`."""
    if 300 <= status < 400:
        raise RefusedError(ErrorClass.TRANSIENT, f"a redirect to {location}, which is not followed", elsewhere=True)
    try:
        answer = document(raw)
    except MalformedError as error:
        if status == 404:
            raise RefusedError(ErrorClass.UNSUPPORTED, GATEWAY_OFF, elsewhere=True) from error
        said = raw[:200].decode(errors="replace").strip()
        if COMMON_NAME in said.lower():
            raise RefusedError(ErrorClass.AUTH, f"{said} (status {status})") from error
        raise RefusedError(ErrorClass.TRANSIENT, f"nonsense with status {status}: {error}", elsewhere=True) from error
    nested = answer.get("error")
    failure = nested if isinstance(nested, dict) else answer
    code, text = failure.get("code", failure.get("grpc_code")), failure.get("message")
    if isinstance(code, int) and isinstance(text, str):
        if code == NOT_FOUND and text == "Not Found":  # the gateway's word for a path that it does not have
            raise RefusedError(ErrorClass.UNSUPPORTED, GATEWAY_OFF, elsewhere=True)
        raise RefusedError(classify(code, text), f"{text} (code {code})", elsewhere=another_may_know(code, text))
    if status != 200 or nested is not None:
        what = f"status {status} with {raw[:80]!r}"
        raise RefusedError(ErrorClass.TRANSIENT, f"nonsense: {what}", elsewhere=True)
    return answer
