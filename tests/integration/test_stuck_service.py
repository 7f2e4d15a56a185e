"""A service in D state, found by the watchdog: killed once, waited for a bounded time, quarantined, and left alone."""

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from supervisor import proc
from supervisor.flock import MutexBusy, take_path
from supervisor.service import ending, runner
from supervisor.service.requests import Act, Refused, Verb
from supervisor.service.states import State
from supervisor.watchdog.round import Watchdog
from supervisor.watchdog.verdict import Kind
from tests.bed.freezable import fsfreeze
from tests.bed.keeper import Bed, until
from tests.bed.services import node_on, shell

SLEEP = "exec sleep 600"


async def test_a_service_in_d_state_is_killed_once_quarantined_and_never_started_beside(
    keeper: Bed, freezable: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """open-gpu-kernel-modules 1223, unsloth 3331, crun 868, systemd 13288: one SIGKILL, a bounded wait, then its lock
    stays, the node is unfit, nothing starts beside it, and others go on. Let go, it is gone, and can be started."""
    monkeypatch.setattr(ending, "KILL_WAIT", 0.5)
    monkeypatch.setattr(runner, "QUARANTINE_LOOK", 0.1)
    asked: Counter[str] = Counter()
    call = keeper.client.call

    async def counted(op: str, **fields: Any) -> dict[str, Any]:
        asked[f"{op} {fields.get('service')}"] += 1
        return await call(op, **fields)

    monkeypatch.setattr(keeper.client, "call", counted)
    writes = shell(f"while :; do echo x >> {freezable}/file; done", gpu=0, lock="lifetime", gpu_fd="optional")
    waits = shell(SLEEP, gpu=0, lock="lifetime", gpu_fd="optional", priority=-1)
    async with node_on(keeper, stuck=writes, other=shell(SLEEP), waits=waits) as node:
        await node.launch()
        pid = (await node.state("stuck", State.RUNNING))["pid"]
        other = (await node.state("other", State.RUNNING))["pid"]
        await until((freezable / "file").exists, "the first write")
        watchdog = Watchdog(
            node.services,
            node.driver,
            clock=node.services.clock,
            interval=0.2,
            confirm=0.1,
            lock_files={0: node.lock_file},
            on_event=node.events.append,
        )
        await asyncio.to_thread(fsfreeze, "-f", freezable)
        try:
            await until(lambda: (found := proc.stat(pid)) is not None and found.state == "D", "D state")
            rounds = asyncio.create_task(watchdog.run())
            row = await node.state("stuck", State.QUARANTINED, seconds=30)
            assert "survived SIGKILL" in row["why"]
            assert str(pid) in row["why"]
            assert "d-state" in row["why"]
            assert row["lock"] == "held"
            with pytest.raises(MutexBusy):
                take_path(node.lock_file)
            assert node.services.quarantined() == [f"stuck: {row['why']}"]  # what makes the node unfit
            seen = watchdog.rounds
            await until(lambda: watchdog.rounds >= seen + 4 or None, "four more rounds", 30)
            assert isinstance(await node.services.request("stuck", Verb.START, no_start=""), Refused)
            assert isinstance(await node.services.request("stuck", Verb.RESTART, no_start=""), Refused)
            assert (asked["start stuck"], asked["kill stuck"]) == (1, 1)
            assert node.row("stuck")["state"] == "quarantined"
            assert node.row("waits")["state"] == "waiting-lock"
            assert (node.row("other")["pid"], node.row("other")["state"]) == (other, "running")
        finally:
            await asyncio.to_thread(fsfreeze, "-u", freezable)
        row = await node.state("stuck", State.STOPPED, seconds=20)
        assert row["why"] == "what had survived is gone"
        assert proc.stat(pid) is None
        assert node.services.quarantined() == []
        await node.state("waits", State.RUNNING)
        assert await node.services.request("waits", Verb.STOP, no_start="") is Act.END
        assert await node.services.request("stuck", Verb.START, no_start="") is Act.LAUNCH
        await node.state("stuck", State.RUNNING, State.WAITING_LOCK)
        await node.state("stuck", State.RUNNING)
        rounds.cancel()
        await asyncio.gather(rounds, return_exceptions=True)


async def test_a_disk_that_is_slow_for_less_than_a_round_costs_nobody_his_life(keeper: Bed, freezable: Path) -> None:
    """D state alone is no fault: only a whole interval of it, without one context switch, is."""
    writes = shell(f"while :; do echo x >> {freezable}/file; done")
    async with node_on(keeper, writes=writes) as node:
        await node.launch()
        pid = (await node.state("writes", State.RUNNING))["pid"]
        await until((freezable / "file").exists, "the first write")
        watchdog = Watchdog(
            node.services,
            node.driver,
            clock=node.services.clock,
            interval=600.0,
            confirm=0.1,
            lock_files={},
            on_event=node.events.append,
        )
        for _ in range(2):
            await asyncio.to_thread(fsfreeze, "-f", freezable)
            try:
                await until(lambda: (found := proc.stat(pid)) is not None and found.state == "D", "D state")
                assert [verdict.kind for verdict in await watchdog.round()] == [Kind.HEALTHY]
            finally:
                await asyncio.to_thread(fsfreeze, "-u", freezable)
            size = (freezable / "file").stat().st_size
            await until(lambda size=size: (freezable / "file").stat().st_size > size or None, "a write")  # type: ignore[misc]
        assert node.row("writes")["pid"] == pid
