"""Child processes of tests on a loop: gone at the end of the block, however it ends."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


@asynccontextmanager
async def child(*command: str, **options: Any) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process that runs in the root of this project, and whose pipes nobody leaves open: one that is left to the
    garbage collector fails another test."""
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, **options)
    try:
        yield process
    finally:
        process._transport.close()  # type: ignore[attr-defined] # SIGKILL; waits for no heir of its pipes
        await process.wait()
