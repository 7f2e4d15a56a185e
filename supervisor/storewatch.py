"""Looks at etcd now and then for what ends badly if nobody acts: a database near its quota, a certificate near its end.

A full etcd takes no writes, so no refresh either, and the node that leads gives up (rule 9).
"""

import asyncio
from collections.abc import Callable, Sequence

from election.clock import Clock
from election.store import ErrorClass, LockStore
from election.stores.etcd_errors import ADVICE
from election.stores.etcd_http import EndpointStatus, EtcdStore

EVERY = 600.0
"""Seconds between looks."""
PATIENCE = 5.0
"""Seconds for the members to answer; who is silent is told of by others."""
FULL = 0.8
"""Share of the quota from which on it is told."""


async def watch_store(store: LockStore, quota: int, clock: Clock, alarm: Callable[[str, str], None]) -> None:
    """For ever, on etcd; at once back on another store. Each danger is told when it begins. `quota`: bytes, where etcd
    does not tell its own."""
    if not isinstance(store, EtcdStore):
        return
    told: set[str] = set()
    while True:
        statuses = await store.status(deadline=clock.now() + PATIENCE)
        files = await asyncio.to_thread(store.access.troubles, clock.wall())
        found = dangers(statuses, quota) | {text: ("store-files", text) for text in files}
        for what in found.keys() - told:
            alarm(*found[what])
        told = set(found)
        await clock.sleep_until(clock.now() + EVERY)


def dangers(statuses: Sequence[EndpointStatus], quota: int) -> dict[str, tuple[str, str]]:
    """Kind and text of an alarm, by what stays the same as long as it lasts."""
    found = {}
    for status in statuses:
        for text in status.alarms:
            cause = f"{status.endpoint} says: {text.strip()}"
            if "NOSPACE" in text:
                cause = f"etcd is out of space, so no node can lead ({cause}): {ADVICE[ErrorClass.NO_SPACE]}"
            found[text] = ("store-full" if "NOSPACE" in text else "store", cause)
        limit = status.quota or quota
        if status.db_size >= FULL * limit:
            share = f"{status.db_size / limit:.0%} of its quota ({status.db_size} of {limit} bytes)"
            text = f"the database of {status.endpoint} is at {share}; when it is full no node can lead"
            found[status.endpoint] = ("store-filling", f"{text}: {ADVICE[ErrorClass.NO_SPACE]}")
    return found
