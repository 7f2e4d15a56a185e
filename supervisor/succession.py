"""There is always one keeper: it is found or started, and a lost one gets a successor (rule 16)."""

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, Protocol

from election.clock import Clock
from election.events import Term
from supervisor.keeper.client import KeeperGone, KeeperRefused
from supervisor.keeper.link import KeeperLink
from supervisor.lockwatch import LockWatch
from supervisor.service.manager import Services
from supervisor.tenure import Tenure

SPAWN = 5.0
"""Seconds for a keeper to start and answer; it takes about 50 ms."""
REPLACE = 3.0
"""Seconds for a new keeper to take the place of a lost one, which is done in about 0.1 s (rule 16)."""
AGAIN = 0.2
"""Seconds between two tries of that."""


@dataclass(frozen=True)
class Guarded:
    """The term that the keeper guards."""

    term: Term
    adopted: bool
    """Its services are ours already: a successor has to be given what it needs. Else the take-over does that."""
    outlives: bool
    """It goes on after the loss of its keeper, if it gets a new one."""


class Holder(Protocol):
    """The node, as the succession sees it."""

    def guarded(self) -> Guarded | None: ...

    def ends(self, token: int) -> bool:
        """Has the end of this term been begun?"""
        ...

    def fence(self, why: str) -> None: ...

    def spawn(self, work: Coroutine[Any, Any, None]) -> object: ...

    def alarm(self, kind: str, text: str) -> None: ...

    def note(self, text: str) -> None: ...


class Succession:
    """See above."""

    def __init__(
        self, keeper: KeeperLink, clock: Clock, node: Holder, tenure: Tenure, services: Services, lock_watch: LockWatch
    ) -> None:
        self._keeper, self._clock, self._node = keeper, clock, node
        self._tenure, self._services, self._lock_watch = tenure, services, lock_watch
        self.trouble = "not started yet"
        """Why there is no keeper; empty where there is one."""

    async def ensure(self) -> None:
        """A keeper answers, or `trouble` says why not."""
        try:
            await self._keeper.ensure(deadline=self._clock.now() + SPAWN)
            self.trouble = ""
        except (KeeperGone, KeeperRefused, OSError) as error:
            if str(error) != self.trouble:
                self._node.alarm("keeper", str(error))
            self.trouble = str(error)

    async def arm(self, token: int, deadline: float, by: float) -> None:
        """The keeper's switch is at `deadline`, all in boot-time seconds. One that is lost on the way gets a successor
        first. Raises KeeperGone, KeeperRefused."""
        while True:
            try:
                await self._keeper.call("arm", deadline=by, token=token, deadline_ns=int(deadline * 1e9))
                return
            except KeeperGone:
                await asyncio.sleep(0)  # the loss of the keeper is told after the end of the call that noticed it
                if not self._keeper.replacing or self._clock.now() >= by:
                    raise

    def lost(self) -> None:
        """The keeper's connection broke."""
        self.trouble = "its connection broke"
        self._lock_watch.keeper_gone()
        self._services.messages_lost()
        self._node.alarm("keeper", "the keeper is gone")
        guarded = self._node.guarded()
        if guarded is None:
            return
        if self._keeper.weak or not guarded.outlives:
            self._node.fence("the keeper is gone")
        elif not self._keeper.replacing:
            self._keeper.replacing = True
            self._node.spawn(self._replace(guarded.term))

    async def _replace(self, term: Term) -> None:
        """A new one adopts what the lost one had, with its deadline; else nothing guards this term any more."""
        by = self._clock.now() + REPLACE
        while (trouble := await self._replaced(term, by)) and self._clock.now() + AGAIN < by:
            await self._clock.sleep_until(self._clock.now() + AGAIN)
        self._keeper.replacing = False
        self.trouble = trouble
        if trouble:
            self._node.fence(f"the keeper is gone, and no new one could take its place: {trouble}")

    async def _replaced(self, term: Term, by: float) -> str:
        """One try; why it failed, empty if it did not."""
        try:
            await self._keeper.ensure(deadline=by)
            if self._node.ends(term.token):  # fenced meanwhile, and without this keeper
                await self._keeper.call("end", deadline=by, token=term.token, by_ns=int(by * 1e9))
                return ""
            guarded = self._node.guarded()
            if guarded is not None and guarded.adopted:
                await self._tenure.keeper_replaced(term, by)
            self._services.messages_lost()
            self._node.note(f"a new keeper, pid {self._keeper.hello['pid']}, goes on with term {term.token}")
        except (KeeperGone, KeeperRefused, OSError) as error:
            return str(error)
        return ""
