"""What a node must not forget: the journal of its claims, the highest token ever seen, and the term it is in."""

from dataclasses import dataclass
from typing import Protocol

from election.events import Term


@dataclass(frozen=True)
class Remembered:
    """What was found at the start."""

    instances: tuple[str, ...]
    floor: int
    term: Term | None
    """A term of this boot whose end may not be on record yet."""
    resumed_from: float | None = None
    """Its last refresh was sent at this moment (boot-time seconds), the keeper still has it, and its end was never
    begun: it may go on (rule 15). None: nothing of it runs any more, and only its end is to be recorded."""
    revision: int = 0
    """The store's, when it was last kept (rule 21)."""


class Memory(Protocol):
    """Every call may take as long as a disk does, and may raise OSError: the elector gives each a deadline."""

    async def load(self) -> Remembered: ...

    async def note_claim(self, instance: str) -> None:
        """On disk when it returns: the claim must not be sent before."""
        ...

    async def note_token(self, token: int) -> None: ...

    async def note_revision(self, revision: int) -> None: ...

    async def note_term(self, term: Term) -> None: ...

    async def note_end_begun(self, term: Term) -> None:
        """From here on the term never runs again."""
        ...

    async def forget_term(self) -> None: ...
