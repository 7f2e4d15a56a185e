"""What is wrong with a configuration: one `Problem` per place, all of them in one `ConfigErrors`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic_core import PydanticCustomError

SHOWN = 80
"""Characters of a found value that a message shows at most."""


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong, for people. Holds no secret: see `shown`."""

    file: str
    line: int | None
    """Counted from 1; None where the file as a whole is meant."""
    path: str
    """Where in the configuration, as in `services.trainer.lock`; empty where the file as a whole is meant."""
    found: str
    expected: str
    hint: str = ""

    def __str__(self) -> str:
        place = self.file if self.line is None else f"{self.file}:{self.line}"
        path = f"{self.path}: " if self.path else ""
        hint = f" ({self.hint})" if self.hint else ""
        return f"{place}: {path}found {self.found}, expected {self.expected}{hint}"


class ConfigErrors(Exception):  # noqa: N818 — it holds several errors
    """The configuration cannot be used. `problems` holds everything that is wrong, in the order of the files."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = list(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


def wrong(expected: str, *, found: str = "", hint: str = "") -> PydanticCustomError:
    """The error that a validator raises. Without `found`, the message shows the value itself where that is safe."""
    context: dict[str, Any] = {"expected": expected, "found": found, "hint": hint}
    return PydanticCustomError("gpuward", "expected {expected}", context)


def described(value: object) -> str:
    """A value for a message: texts quoted and cut, collections by their kind only, since they may hold anything."""
    match value:
        case None:
            return "nothing"
        case bool():
            return "true" if value else "false"
        case dict():
            return "a mapping"
        case list() | tuple():
            return "a list" if value else "an empty list"
        case str():
            return ascii(value) if len(value) <= SHOWN else ascii(value[:SHOWN]) + "…"
        case _:
            return str(value)[:SHOWN]
