"""A process that claims a key in a local store: `python -m tests.integration.claimant FILE`.

Says "ready", waits for a line, claims, and says how it went.
"""

import asyncio
import sys

from election.clock import BootClock, boot_time_loop
from election.store import ModIs, Put, StoreError, Txn
from election.stores.local import LocalStore

CLAIMED, TAKEN = "claimed", "taken"


async def claim(path: str) -> str:
    clock = BootClock()
    store = LocalStore(path, clock=clock)
    try:
        txn = Txn((ModIs("/leader", 0),), (Put("/leader", b"x"),))
        done = await store.commit(txn, deadline=clock.now() + 60)
        return CLAIMED if done.succeeded else TAKEN
    except StoreError as error:
        return str(error)
    finally:
        await store.close()


if __name__ == "__main__":
    print("ready", flush=True)
    sys.stdin.readline()
    with asyncio.Runner(loop_factory=boot_time_loop) as runner:
        print(runner.run(claim(sys.argv[1])), flush=True)
