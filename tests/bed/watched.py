"""A supervisor's services and watchdog as a process of their own, to be stopped and continued.

    python -m tests.bed.watched RUN

Uses the keeper of RUN; tells {"pid", "rounds", "skipped"} in a line whenever one of them changes.
"""

import asyncio
import json
import sys
from pathlib import Path

from election.clock import boot_time_loop
from supervisor.keeper.client import KeeperClient
from supervisor.watchdog.round import Watchdog
from tests.bed.keeper import Bed
from tests.bed.services import node_on, shell

INTERVAL = 0.3


async def main(run: Path) -> None:
    """Until killed."""
    bed = Bed(run, None, await KeeperClient.connect(run))
    holder = shell(f"exec 9<>{run}/gpu/nvidia0; exec sleep 600", gpu=0, lock="lifetime")
    async with node_on(bed, llm=holder) as node:
        await node.arm(1, seconds=600)
        await node.services.launch(1, deadline=node.services.clock.now() + 5)
        watchdog = Watchdog(
            node.services,
            node.driver,
            clock=node.services.clock,
            interval=INTERVAL,
            confirm=0.1,
            lock_files={0: node.lock_file},
            on_event=node.events.append,
        )
        rounds = asyncio.create_task(watchdog.run())
        told = None
        while not rounds.done():
            now = {"pid": node.row("llm")["pid"], "rounds": watchdog.rounds, "skipped": watchdog.skipped}
            if now != told:
                print(json.dumps(now), flush=True)
                told = now
            await asyncio.sleep(0.02)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=boot_time_loop) as runner:
        runner.run(main(Path(sys.argv[1])))
