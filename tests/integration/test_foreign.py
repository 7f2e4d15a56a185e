"""Processes on a GPU that gpuward did not start, under each policy."""

import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from supervisor.gpu.simulated import SimulatedDriver, device_file, set_state
from tests.bed.nodes import LONG_TTL, Make, NodeBed, gone

SLEEPER = ("sleep", "1000")
DEAF = "trap '' TERM; echo up; while :; do sleep 1; done"


class Strangers:
    """Processes that have the GPU open; all are ended."""

    def __init__(self) -> None:
        self.all: list[subprocess.Popen[bytes]] = []

    def on(self, device: Path, *command: str) -> int:
        with device.open("rb") as file:
            made = subprocess.Popen(command, stdin=file, stdout=subprocess.PIPE)
        self.all.append(made)
        return made.pid

    def status(self, pid: int, within: float = 30) -> int:
        return next(one for one in self.all if one.pid == pid).wait(within)


@pytest.fixture
def strangers() -> Iterator[Strangers]:
    made = Strangers()
    yield made
    for one in made.all:
        one.kill()
        one.communicate()


def _bed(make_node: Make, policy: str, **gpu: object) -> NodeBed:
    node = make_node(ttl=LONG_TTL)
    node.config["gpu"] |= {"foreign": policy, **gpu}
    node.add_service("one", *SLEEPER)
    return node


def _device(node: NodeBed) -> Path:
    """Made before the node starts, as a GPU is there before it."""
    SimulatedDriver(node.folder / "gpu", 1)
    return device_file(node.folder / "gpu", 0)


def _some_looks() -> None:
    """What must not happen has no event. One look a second."""
    time.sleep(2.5)


def _alarms(node: NodeBed) -> list[str]:
    return [row["text"] for row in (node.status() or {})["alarms"] if row["kind"] == "foreign"]


def test_terminate_ends_a_stranger_before_the_take_over_the_deaf_one_with_sigkill(
    make_node: Make, strangers: Strangers
) -> None:
    node = _bed(make_node, "terminate")
    device = _device(node)
    meek, deaf = strangers.on(device, *SLEEPER), strangers.on(device, "sh", "-c", DEAF)
    node.after_an_orderly_end().start().until_leading()
    assert strangers.status(meek) == -signal.SIGTERM
    assert strangers.status(deaf) == -signal.SIGKILL
    assert f"SIGTERM to {meek} (" in node.output()


def test_ignore_leaves_a_stranger_and_leads(make_node: Make, strangers: Strangers) -> None:
    node = _bed(make_node, "ignore")
    device = _device(node)
    stranger = strangers.on(device, *SLEEPER)
    node.after_an_orderly_end().start().until_leading()
    assert not gone(stranger)
    assert f"GPU 0 is in use by {stranger} (" in node.output()


def test_a_monitor_is_left_alone_and_in_nobodys_way(make_node: Make, strangers: Strangers, tmp_path: Path) -> None:
    """dcgm-exporter 84: killing a monitor can freeze the GPU."""
    monitor = tmp_path / "monitor"
    shutil.copy(shutil.which("sleep") or "/bin/sleep", monitor)
    node = _bed(make_node, "terminate", monitors=[str(monitor)])
    device = _device(node)
    pid = strangers.on(device, str(monitor), "1000")
    node.after_an_orderly_end().start().until_leading()
    _some_looks()
    assert not gone(pid)


@pytest.mark.parametrize("policy", ["refuse", "terminate", "ignore"])
def test_a_stranger_that_comes_later_is_told_once_and_ended_only_under_terminate(
    make_node: Make, strangers: Strangers, policy: str
) -> None:
    node = _bed(make_node, policy).after_an_orderly_end()
    before = node.start().until_leading()
    stranger = strangers.on(Path(before["gpus"][0]["device"]), *SLEEPER)
    node.until(lambda: f"GPU 0 is in use by {stranger} (" in node.output())
    if policy == "terminate":
        assert strangers.status(stranger) == -signal.SIGTERM
    else:
        _some_looks()
        assert not gone(stranger)
    assert len(_alarms(node)) == (policy != "ignore")
    assert node.output().count(f"GPU 0 is in use by {stranger} (") == 1
    after = node.status()
    assert after is not None
    assert [row["pid"] for row in after["services"]] == [row["pid"] for row in before["services"]]


def test_a_service_with_its_gpu_open_is_no_stranger(make_node: Make) -> None:
    node = _bed(make_node, "terminate").after_an_orderly_end()
    opens = ("sh", "-c", f"exec 9<{_device(node)}; exec sleep 1000")
    node.add_service("user", *opens, gpu=0, lock="lifetime")
    before = node.start().until_leading()
    _some_looks()
    assert not gone(before["services"][1]["pid"])
    assert _alarms(node) == []


@pytest.mark.parametrize("policy", ["refuse", "terminate"])
def test_a_pid_that_does_not_exist_stands_in_the_way_of_a_take_over(make_node: Make, policy: str) -> None:
    """VisEdit 5."""
    node = _bed(make_node, policy)
    _device(node)
    set_state(node.folder / "gpu", 0, ghost_pids=(4194300,))
    node.after_an_orderly_end().start()
    node.until(
        lambda: any(
            "in use by 4194300: end" in why for why in (node.status() or {"unfit_because": []})["unfit_because"]
        )
    )
    assert "4194300, which does not exist" in node.output()
