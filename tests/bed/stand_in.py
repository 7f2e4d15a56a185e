"""A supervisor to be stopped and killed: arms a term, starts one service, says so, and then only holds on.

python -m tests.bed.stand_in RUN TOKEN SECONDS ARGV...
"""

import asyncio
import json
import os
import sys
from pathlib import Path

from election.clock import boot_time, boot_time_loop
from supervisor.keeper.client import KeeperClient


async def main(run: Path, token: int, seconds: float, argv: list[str]) -> None:
    """Print {"deadline", "pid", "start_ticks"} and wait for ever."""
    keeper = await KeeperClient.connect(run)
    deadline = boot_time() + seconds
    await keeper.call("arm", deadline=boot_time() + 5, token=token, deadline_ns=int(deadline * 1e9))
    started = await keeper.call(
        "start", deadline=boot_time() + 5, token=token, service="s", argv=argv, env=dict(os.environ), cwd="/",
        uid=None, gid=None, groups=[], log=str(run / "s.log"), lock=None,
    )  # fmt: skip
    print(json.dumps({"deadline": deadline, **started}), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=boot_time_loop) as runner:
        runner.run(main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4:]))
