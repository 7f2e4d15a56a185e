"""One record per term in the store, for people: who, why it began and ended, how long each step took."""

import json
from collections.abc import Mapping
from typing import Any

from election.clock import Clock
from election.events import Term
from election.record import Keys, timestamp
from election.store import Delete, LockStore, Put, Txn

KEPT = 100
"""Terms."""


class History:
    """Best effort: a store that does not answer costs one deadline and one line in the log."""

    def __init__(self, keys: Keys, store: LockStore, clock: Clock, node: str, limit: float) -> None:
        """`limit`: seconds for one call."""
        self._keys, self._store, self._clock, self._node, self._limit = keys, store, clock, node, limit

    async def began(self, term: Term, before: str | None, steps: Mapping[str, float]) -> None:
        """The take-over is done. Drops the oldest records beyond `KEPT`. Raises StoreError."""
        await self._put(term, {"after": before, "steps": dict(steps), "ended": None, "because": None})
        found = await self._store.read([self._keys.histories], prefix=True, deadline=self._by())
        by_token = sorted((entry.key for entry in found.entries), key=lambda key: (len(key), key))
        old = tuple(Delete(key) for key in by_token[:-KEPT])
        if old:
            await self._store.commit(Txn((), old), deadline=self._by())

    async def ended(self, term: Term, because: str) -> None:
        """Adds the end to the record. Raises StoreError."""
        entry = (await self._store.read([self._keys.history(term.token)], deadline=self._by())).get(
            self._keys.history(term.token)
        )
        known = _parse(entry.value) if entry else {}
        await self._put(term, known | {"ended": timestamp(self._clock.wall()), "because": because})

    async def _put(self, term: Term, more: dict[str, Any]) -> None:
        value = {"node": self._node, "token": term.token, "instance": term.instance, "began": term.began} | more
        put = Put(self._keys.history(term.token), json.dumps(value).encode())
        await self._store.commit(Txn((), (put,)), deadline=self._by())

    def _by(self) -> float:
        return self._clock.now() + self._limit


def _parse(value: bytes) -> dict[str, Any]:
    try:
        found = json.loads(value)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
