"""Exit codes of every command, and the two ends that many of them share."""

import sys
from pathlib import Path
from typing import NoReturn

import typer

from supervisor.config.loading import ConfigErrors, load, load_reach
from supervisor.config.schema import Config, Reach

NOT_RUNNING = 3
"""As systemctl(1) has it for a unit that is not active."""
UNKNOWN = 4
"""As systemctl(1) has it for a unit that does not exist."""
NO_DAEMON = 69
"""EX_UNAVAILABLE of sysexits.h."""
BUSY = 75
"""EX_TEMPFAIL."""
NOT_NOW = BUSY
"""It cannot be done in the present state; the reason has been said."""
NOT_ALLOWED = 77
"""EX_NOPERM."""
BAD_CONFIG = 78
"""EX_CONFIG."""


def load_or_exit(path: Path) -> Config:
    """The configuration, or every problem on stderr and exit 78."""
    try:
        return load(path)
    except ConfigErrors as errors:
        _end_with(errors)


def reach_or_exit(path: Path) -> Reach:
    """Where the daemon of this configuration answers, or what is wrong there on stderr and exit 78."""
    try:
        return load_reach(path)
    except ConfigErrors as errors:
        _end_with(errors)


def _end_with(errors: ConfigErrors) -> NoReturn:
    for problem in errors.problems:
        print(problem, file=sys.stderr)
    raise typer.Exit(BAD_CONFIG) from None


def fail(message: str, code: int) -> NoReturn:
    """One line on stderr, and the exit code."""
    print(f"gpuward: {message}", file=sys.stderr)
    raise typer.Exit(code)
