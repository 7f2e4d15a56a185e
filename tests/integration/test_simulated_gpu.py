"""The simulated driver: its state files, its faults, and device files that real processes open."""

import asyncio
import json
import os
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from election.clock import boot_time
from supervisor.gpu.driver import DriverError, GpuVerdict, ResetRefusedError
from supervisor.gpu.simulated import (
    SimulatedDriver,
    SimulatedStateError,
    device_file,
    read_state,
    set_persistenced,
    set_state,
)


@pytest.fixture
def driver(tmp_path: Path) -> SimulatedDriver:
    return SimulatedDriver(tmp_path, 2)


@pytest.fixture
def holder(tmp_path: Path, driver: SimulatedDriver) -> Iterator[subprocess.Popen[bytes]]:
    """A process that has GPU 0 open."""
    command = ["sh", "-c", 'exec 9<>"$0"; echo ready; exec sleep 600', str(device_file(tmp_path, 0))]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == b"ready\n"
            yield child
        finally:
            child.kill()


def soon() -> float:
    return boot_time() + 10


async def test_new_gpus_are_healthy_and_have_their_own_uuids(driver: SimulatedDriver, tmp_path: Path) -> None:
    first, second = await driver.facts(deadline=soon())
    assert first.verdict is second.verdict is GpuVerdict.HEALTHY
    assert first.uuid.startswith("GPU-")
    assert first.uuid != second.uuid
    assert (first.index, second.index) == (0, 1)
    assert second.device == device_file(tmp_path, 1)
    assert first.persistence is False
    assert SimulatedDriver(tmp_path, 2)  # a second driver on the same folder finds the same GPUs
    assert (await driver.facts(deadline=soon()))[0].uuid == first.uuid


async def test_the_pids_are_those_that_really_have_the_device_open(
    driver: SimulatedDriver, holder: subprocess.Popen[bytes]
) -> None:
    first, second = await driver.facts(deadline=soon())
    assert first.pids == frozenset({holder.pid})
    assert second.pids == frozenset()


async def test_a_ghost_is_listed_without_a_process(driver: SimulatedDriver, tmp_path: Path) -> None:
    """VisEdit 5: the driver lists a PID that does not exist."""
    set_state(tmp_path, 0, ghost_pids=[999999])
    assert (await driver.facts(deadline=soon()))[0].pids == frozenset({999999})


@pytest.mark.parametrize("verdict", list(GpuVerdict))
async def test_every_fault_can_be_set_from_outside(
    driver: SimulatedDriver, tmp_path: Path, verdict: GpuVerdict
) -> None:
    set_state(tmp_path, 1, verdict=verdict.value)
    assert [gpu.verdict for gpu in await driver.facts(deadline=soon())] == [GpuVerdict.HEALTHY, verdict]


async def test_a_driver_that_does_not_answer_is_unresponsive_at_the_deadline(
    driver: SimulatedDriver, tmp_path: Path
) -> None:
    """gpud 117, open-gpu-kernel-modules 1333: a driver call that hangs must not hang us."""
    set_state(tmp_path, 0, answer_s=3600)
    began = boot_time()
    first, second = await driver.facts(deadline=began + 2)
    assert first.verdict is GpuVerdict.UNRESPONSIVE
    assert first.pids is None
    assert second.verdict is GpuVerdict.HEALTHY
    assert boot_time() - began < 60


async def test_a_reset_cures_and_is_verified(driver: SimulatedDriver, tmp_path: Path) -> None:
    set_state(tmp_path, 0, verdict="reset-required", ghost_pids=[999999], reset_s=0.01)
    uuid = (await driver.facts(deadline=soon()))[0].uuid
    await driver.reset(uuid, deadline=soon())
    after = (await driver.facts(deadline=soon()))[0]
    assert (after.verdict, after.pids) == (GpuVerdict.HEALTHY, frozenset())
    assert read_state(tmp_path, 0).resets == 1


async def test_a_reset_that_does_not_help_is_an_error(driver: SimulatedDriver, tmp_path: Path) -> None:
    set_state(tmp_path, 0, verdict="lost")
    uuid = (await driver.facts(deadline=soon()))[0].uuid
    with pytest.raises(DriverError, match="is lost after its reset"):
        await driver.reset(uuid, deadline=soon())


async def test_a_reset_is_refused_while_a_process_is_on_the_gpu(
    driver: SimulatedDriver, tmp_path: Path, holder: subprocess.Popen[bytes]
) -> None:
    """gpu-operator 118: the holder is named."""
    uuid = (await driver.facts(deadline=soon()))[0].uuid
    with pytest.raises(ResetRefusedError, match=str(holder.pid)) as refused:
        await driver.reset(uuid, deadline=soon())
    assert refused.value.holders == {holder.pid}
    assert not refused.value.permanent
    assert read_state(tmp_path, 0).resets == 0


async def test_a_platform_that_cannot_reset_says_so_for_good(driver: SimulatedDriver, tmp_path: Path) -> None:
    set_state(tmp_path, 0, reset_refused="not supported")
    uuid = (await driver.facts(deadline=soon()))[0].uuid
    with pytest.raises(ResetRefusedError, match="not supported") as refused:
        await driver.reset(uuid, deadline=soon())
    assert refused.value.permanent


async def test_a_reset_keeps_its_deadline(driver: SimulatedDriver, tmp_path: Path) -> None:
    set_state(tmp_path, 0, reset_s=3600)
    uuid = (await driver.facts(deadline=soon()))[0].uuid
    with pytest.raises(DriverError, match="no answer by the deadline") as late:
        await driver.reset(uuid, deadline=boot_time() + 0.1)
    assert late.value.verdict is GpuVerdict.UNRESPONSIVE


async def test_persistence_means_daemon_and_mode(driver: SimulatedDriver, tmp_path: Path) -> None:
    """gpu-facts: a running daemon is not persistence mode."""
    set_persistenced(tmp_path, running=True)
    assert [gpu.persistence for gpu in await driver.facts(deadline=soon())] == [False, False]
    await driver.ensure_persistence(deadline=soon())
    assert [gpu.persistence for gpu in await driver.facts(deadline=soon())] == [True, True]


async def test_a_daemon_that_cannot_be_started_is_an_error(driver: SimulatedDriver, tmp_path: Path) -> None:
    set_persistenced(tmp_path, startable=False)
    with pytest.raises(DriverError, match="cannot be started"):
        await driver.ensure_persistence(deadline=soon())


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ('{"verdct": "lost"}', "verdct"),
        ('{"verdict": "broken"}', "verdict"),
        ('{"reset_s": -1}', "reset_s"),
        ('{"reset_s": "1"}', "reset_s"),
        ('{"persistence": 1}', "persistence"),
        ('{"ghost_pids": [true]}', "ghost_pids"),
        ('{"resets": -1}', "resets"),
        ('{"uuid": 7}', "uuid"),
        ('["lost"]', "JSON object"),
        ("{", "JSON"),
    ],
)
async def test_a_wrong_state_file_is_an_error_with_file_and_key(
    driver: SimulatedDriver, tmp_path: Path, content: str, named: str
) -> None:
    (tmp_path / "gpu-0.json").write_text(content)
    with pytest.raises(SimulatedStateError, match=named) as wrong:
        await driver.facts(deadline=soon())
    assert "gpu-0.json" in str(wrong.value)


@pytest.mark.parametrize("limit", [0, 1, 2])
async def test_a_driver_without_a_free_file_descriptor_knows_nothing_of_its_gpus_and_blames_none(
    driver: SimulatedDriver, limit: int
) -> None:
    """However far it gets: a fault of ours must not look like a fault of the node."""
    await driver.facts(deadline=soon())  # its thread has what it needs
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    in_use = max(int(name) for name in os.listdir("/proc/self/fd"))
    fillers = [os.dup(0) for _ in range(in_use)]
    free = sorted(fillers)[-limit:] if limit else []
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(fillers) + 1, before[1]))
    try:
        for fd in free:
            os.close(fd)
        try:
            found = {gpu.verdict for gpu in await driver.facts(deadline=soon())}
        except DriverError as error:
            found = {error.verdict}
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for fd in set(fillers) - set(free):
            os.close(fd)
    assert found <= {GpuVerdict.HEALTHY, GpuVerdict.UNKNOWN}


def test_a_wrong_fault_is_refused_and_changes_nothing(driver: SimulatedDriver, tmp_path: Path) -> None:
    before = (tmp_path / "gpu-0.json").read_text()
    with pytest.raises(SimulatedStateError, match="colour"):
        set_state(tmp_path, 0, colour="red")
    with pytest.raises(SimulatedStateError, match="verdict"):
        set_state(tmp_path, 0, verdict="brokn")
    assert (tmp_path / "gpu-0.json").read_text() == before


async def test_faults_set_at_the_same_time_do_not_undo_each_other(driver: SimulatedDriver, tmp_path: Path) -> None:
    await asyncio.gather(
        asyncio.to_thread(set_state, tmp_path, 0, verdict="drain"),
        asyncio.to_thread(set_state, tmp_path, 0, ghost_pids=[7]),
        asyncio.to_thread(set_state, tmp_path, 0, answer_s=0.5),
        asyncio.to_thread(set_state, tmp_path, 0, persistence=True),
    )
    state = json.loads((tmp_path / "gpu-0.json").read_text())
    assert (state["verdict"], state["ghost_pids"], state["answer_s"], state["persistence"]) == ("drain", [7], 0.5, True)


async def test_a_device_file_can_be_opened_by_any_user(driver: SimulatedDriver, tmp_path: Path) -> None:
    assert os.stat(device_file(tmp_path, 0)).st_mode & 0o666 == 0o666
