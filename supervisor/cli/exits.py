"""Exit codes of every command, and the two ends that many of them share."""

import sys
from pathlib import Path
from typing import NoReturn

import typer

from supervisor.config.loading import ConfigErrors, load
from supervisor.config.schema import Config

NO_DAEMON = 69
"""EX_UNAVAILABLE of sysexits.h."""
BUSY = 75
"""EX_TEMPFAIL."""
BAD_CONFIG = 78
"""EX_CONFIG."""


def load_or_exit(path: Path) -> Config:
    """The configuration, or every problem on stderr and exit 78."""
    try:
        return load(path)
    except ConfigErrors as errors:
        for problem in errors.problems:
            print(problem, file=sys.stderr)
        raise typer.Exit(BAD_CONFIG) from None


def fail(message: str, code: int) -> NoReturn:
    """One line on stderr, and the exit code."""
    print(f"gpuward: {message}", file=sys.stderr)
    raise typer.Exit(code)
