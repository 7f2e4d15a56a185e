"""What happens to a GPU between the end of a service and its next start: by what its driver says, once, and told."""

import asyncio
import os
import signal
from typing import Any

import pytest

from supervisor.gpu.simulated import read_state, set_state
from supervisor.service.device import DeviceRules
from supervisor.service.states import State
from tests.bed.keeper import Bed, until
from tests.bed.services import NodeBed, node_on, shell

LLM = {"gpu": 0, "lock": "lifetime", "gpu_fd": "optional"}
SLEEP = "exec sleep 600"


async def killed_by_the_watchdog(node: NodeBed, pid: int) -> int:
    await node.services.restart("llm", "lost-gpu: made up", kill=True, pid=pid)
    return await node.new_pid("llm", pid)


@pytest.mark.parametrize("verdict", ["reset-required", "drain"])
async def test_a_gpu_that_asks_for_a_reset_gets_one_after_a_plain_exit_too(keeper: Bed, verdict: str) -> None:
    """sichek 51: a reset was required, and no Xid told of it. What the driver recommends is looked at each time."""
    async with node_on(keeper, llm=shell(SLEEP, **LLM)) as node:
        await node.launch()
        pid = (await node.state("llm", State.RUNNING))["pid"]
        set_state(node.folder, 0, verdict=verdict)
        os.kill(pid, signal.SIGTERM)
        await node.new_pid("llm", pid)
        assert read_state(node.folder, 0).resets == 1
        assert read_state(node.folder, 0).verdict == "healthy"
        assert any("GPU 0: reset in" in event for event in node.events)


async def test_a_reset_that_is_refused_with_no_process_on_the_gpu_is_told_once_and_not_tried_again(keeper: Bed) -> None:
    """mig-parted 181: the loaded nvidia_drm blocked it, with no process: reported as such, and no loop."""
    async with node_on(keeper, llm=shell(SLEEP, **LLM)) as node:
        await node.launch()
        pid = (await node.state("llm", State.RUNNING))["pid"]
        set_state(node.folder, 0, reset_refused="in use by the module nvidia_drm")
        await killed_by_the_watchdog(node, pid)
        assert (await node.state("llm", State.RUNNING))["failures"] == 1
        told = [event for event in node.events if "not reset" in event]
        assert len(told) == 1
        assert "nvidia_drm" in told[0]


async def test_who_is_on_a_gpu_that_cannot_be_reset_for_that_reason_is_named(keeper: Bed) -> None:
    """gpu-operator 118: persistenced blocked the reset, and nobody said so."""
    async with node_on(keeper, llm=shell(SLEEP, **LLM)) as node:
        await node.launch()
        pid = (await node.state("llm", State.RUNNING))["pid"]
        with node.device.open("rb") as device:
            foreign = await asyncio.create_subprocess_exec("sleep", "600", pass_fds=[device.fileno()])
        try:
            await killed_by_the_watchdog(node, pid)
            assert read_state(node.folder, 0).resets == 0
            told = await until(lambda: [event for event in node.events if "not reset" in event], "the reason")
            assert told == [f"GPU 0: not reset: {foreign.pid} (sleep) is on it"]
            assert foreign.returncode is None
        finally:
            foreign.kill()
            await foreign.wait()


@pytest.mark.parametrize(
    ("policy", "killed", "wanted", "reset"),
    [
        ("after-kill", True, False, True),
        ("after-kill", False, False, False),
        ("after-kill", False, True, True),
        ("on-fault", True, False, False),
        ("on-fault", False, True, True),
        ("always", False, False, True),
        ("never", True, True, False),
    ],
)
def test_when_a_gpu_is_reset_is_for_reset_gpu_to_say(policy: Any, killed: bool, wanted: bool, reset: bool) -> None:
    assert DeviceRules(may_reset=True, killed=killed, policy=policy).reset(wanted) is reset
    assert not DeviceRules(may_reset=False, killed=killed, policy=policy).reset(wanted)


@pytest.mark.parametrize(("policy", "resets"), [("always", 1), ("after-kill", 0)])
async def test_a_plain_exit_is_followed_by_a_reset_only_where_it_is_always(
    keeper: Bed, policy: str, resets: int
) -> None:
    service = shell("sleep 0.2", gpu=0, lock="lifetime", gpu_fd="optional", reset_gpu=policy)
    async with node_on(keeper, one=service) as node:
        await node.launch()
        first = node.row("one")["pid"]
        await node.new_pid("one", first)
        assert read_state(node.folder, 0).resets == resets


async def test_a_container_that_has_lost_its_gpu_is_no_reason_to_reset_it(
    keeper: Bed,
) -> None:
    """nvidia-container-toolkit 48: a daemon-reload of systemd took the GPUs from containers."""
    async with node_on(keeper, one=shell(SLEEP, gpu=0, lock="lifetime", gpu_fd="optional")) as node:
        await node.launch()
        before = await node.state("one", State.RUNNING)
        await node.services.restart("one", "lost-gpu", kill=True, resets=False, pid=before["pid"])
        await node.new_pid("one", before["pid"])
        assert read_state(node.folder, 0).resets == 0
        again = await node.state("one", State.RUNNING)
        await node.services.restart("one", "dead", kill=True, pid=again["pid"])
        await node.state("one", State.BACKOFF, State.STARTING)
        await until(lambda: read_state(node.folder, 0).resets == 1, "a reset")
