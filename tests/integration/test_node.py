"""A whole node: supervisor, keeper and services, on the local store, in real cgroups."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from supervisor import proc
from supervisor.cgroup import mount_point
from supervisor.demo.etcd_cluster import EtcdCluster
from supervisor.gpu.simulated import SimulatedDriver, set_persistenced, set_state
from tests.bed.freezable import fsfreeze
from tests.bed.keeper import PATIENCE
from tests.bed.nodes import LONG_TTL, TTL, Make, NodeBed, free_port, gone

SLEEPER = ("sleep", "1000")


def _gpuward(*arguments: str, **environ: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "supervisor.entry", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, env=os.environ | environ, timeout=PATIENCE, check=False
    )


def test_a_node_takes_over_after_one_ttl_runs_its_services_and_says_so_everywhere(make_node: Make) -> None:
    node = make_node()
    node.add_service("one", *SLEEPER)
    node.add_service("two", *SLEEPER, gpu=0, lock="lifetime", gpu_fd="optional")
    began = time.monotonic()
    status = node.start().until_leading()
    assert time.monotonic() - began >= TTL  # an absent term is no proof that nobody runs (rule 8)
    assert status["state"] == "active"
    assert status["term"]["token"] > 0
    assert status["leader"]["token"] == status["term"]["token"]
    assert status["gpus"][0]["lock"]["holder"]["service"] == "two"
    assert status["leader"]["node"] == "n1"
    assert 0 < status["takeovers"][0]["work_s"] < TTL
    assert list(status["takeovers"][0]["steps"]) == [
        "gpu-state",
        "reset",
        "persistence",
        "foreign-processes",
        "lock-files",
        "services",
    ]
    assert [node.get(path)[0] for path in ("/leader", "/primary", "/health", "/liveness", "/standby")] == [
        200,
        200,
        200,
        200,
        503,
    ]
    table = _gpuward("status", "--url", node.url)
    assert table.returncode == 0
    assert "n1" in table.stdout
    assert "two" in table.stdout


def test_the_environment_of_a_service_carries_node_service_token_and_gpu(make_node: Make) -> None:
    node = make_node(ttl=LONG_TTL).after_an_orderly_end()
    node.add_service("one", *SLEEPER, gpu=0, lock="on-demand")
    status = node.start().until_leading()
    pid = status["services"][0]["pid"]
    assert proc.environ_value(pid, "GPUWARD_NODE") == "n1"
    assert proc.environ_value(pid, "GPUWARD_SERVICE") == "one"
    assert proc.environ_value(pid, "GPUWARD_FENCING_TOKEN") == str(status["term"]["token"])
    assert proc.environ_value(pid, "CUDA_VISIBLE_DEVICES") == status["gpus"][0]["uuid"]
    assert json.loads(Path(status["gpus"][0]["lock"]["path"]).read_bytes())["token"] == status["term"]["token"]


def test_told_to_stop_it_ends_the_services_records_the_end_and_leaves_nothing(make_node: Make) -> None:
    node, standby = make_node("n1"), make_node("n2")
    for bed in (node, standby):
        bed.add_service("one", *SLEEPER)
    node.start().until_leading()
    standby.start().until(standby.status)
    keeper = node.keeper()
    node.signal(signal.SIGTERM)
    assert node.exit_code() == 0
    told = time.monotonic()
    assert node.service_pids() == []
    assert gone(keeper)
    assert not (node.run / "gpu-0.lock").exists()
    standby.until(standby.leads)
    assert time.monotonic() - told < TTL - 2  # by the orderly end (8a), not by waiting


def test_a_supervisor_that_may_not_resume_ends_everything_first_and_then_records_the_end(make_node: Make) -> None:
    """repmgr 42: a node that comes back starts fenced. Under another TTL the old deadlines say nothing (rule 15)."""
    node = make_node(ttl=LONG_TTL).after_an_orderly_end()
    node.add_service("one", *SLEEPER)
    first = node.start().until_leading()
    node.kill()
    assert not gone(first["services"][0]["pid"])  # the keeper holds on until the deadline
    node.config["election"]["ttl"] += 1
    second = node.start().until_leading()
    assert gone(first["services"][0]["pid"])
    assert second["term"]["token"] > first["term"]["token"]
    assert "ending term" in node.output()


def test_a_supervisor_whose_keeper_died_too_still_ends_what_they_left(make_node: Make) -> None:
    node = make_node(ttl=LONG_TTL).after_an_orderly_end()
    node.add_service("one", "sh", "-c", "setsid sleep 1000 & exec sleep 1000")
    first = node.start().until_leading()
    left = node.until(lambda: pids if len(pids := node.service_pids()) == 2 else None)
    keeper = node.keeper()
    node.kill()
    os.kill(keeper, signal.SIGKILL)
    node.config["election"]["ttl"] += 1  # so the term is not resumed
    node.start().until_leading()
    assert all(gone(pid) for pid in left)
    assert first["term"]["token"] > 0


def test_a_keeper_that_cannot_be_replaced_ends_the_term_at_once_and_a_new_one_serves_the_next(make_node: Make) -> None:
    """Rule 16: no keeper, no authority."""
    node = make_node()
    node.add_service("one", *SLEEPER)
    first = node.start().until_leading()
    (node.run / "keeper.log").unlink()
    (node.run / "keeper.log").mkdir()
    os.kill(node.keeper(), signal.SIGKILL)
    node.until(lambda: gone(first["services"][0]["pid"]))
    (node.run / "keeper.log").rmdir()
    second = node.until(lambda: (s := node.until_leading()) and s["term"]["token"] > first["term"]["token"] and s)
    assert second["keeper"]["pid"] != first["keeper"]["pid"]


def test_a_stopped_supervisor_loses_its_services_at_the_switch_and_stays_down_when_continued(make_node: Make) -> None:
    """Nobody else solves this: the keeper ends everything at the deadline, before another node may claim."""
    node, standby = make_node("n1"), make_node("n2")
    for bed in (node, standby):
        bed.add_service("one", *SLEEPER)
    first = node.start().until_leading()
    standby.start().until(standby.status)
    node.signal(signal.SIGSTOP)

    def over() -> bool:
        new = standby.service_pids()
        old = node.service_pids()  # in this order: what was there before may have gone meanwhile
        assert not (new and old)
        return not old

    node.until(over)
    standby.until_leading()
    node.signal(signal.SIGCONT)
    node.until(lambda: (found := node.status()) and found["role"] == "standby" and found["term"] is None)
    assert not node.service_pids()
    assert not node.leads()
    assert standby.leads()
    node.until(lambda: (found := node.status()) and {row["state"] for row in found["services"]} == {"stopped"})
    assert first["term"]["token"] < standby.until_leading()["term"]["token"]


def test_a_foreign_process_on_the_gpu_fails_the_take_over_and_the_next_node_goes(make_node: Make) -> None:
    """Rule 13: orderly end, stay out for one TTL, say why."""
    node, other = make_node("n1"), make_node("n2")
    for bed in (node, other):
        bed.add_service("one", *SLEEPER)
    node.start().until(node.status)
    device = Path(node.until(lambda: node.status()["gpus"][0]["device"]))  # type: ignore[index]
    with device.open("rb"):
        node.until(lambda: (found := node.status()) and found["unfit_because"])
        status = node.status()
        assert status is not None
        assert "staying out" in status["unfit_because"][0]
        assert f"GPU 0 is in use by {os.getpid()}: end" in status["unfit_because"][0]
        other.start().until_leading()
        assert node.service_pids() == []


def _no_reset(node: NodeBed) -> None:
    set_state(node.folder / "gpu", 0, verdict="reset-required", reset_refused="not supported")


def _no_daemon(node: NodeBed) -> None:
    set_persistenced(node.folder / "gpu", startable=False)


def _no_lock_file(node: NodeBed) -> None:
    node.run.mkdir(exist_ok=True)
    (node.run / "gpu-0.lock").mkdir()


@pytest.mark.parametrize(
    ("step", "breaks"), [("reset", _no_reset), ("persistence", _no_daemon), ("lock-files", _no_lock_file)]
)
def test_a_take_over_that_fails_at_a_step_ends_in_good_order_and_the_next_node_goes(
    make_node: Make, step: str, breaks: Callable[[NodeBed], None]
) -> None:
    """Rule 13. The other node would wait 90 s if it were not for the orderly end."""
    node, other = make_node("n1", ttl=LONG_TTL).after_an_orderly_end(), make_node("n2", ttl=LONG_TTL, priority=0)
    for bed in (node, other):
        bed.add_service("one", *SLEEPER)
        SimulatedDriver(bed.folder / "gpu")
    breaks(node)
    other.start()
    node.start()
    other.until_leading()
    found = node.until(lambda: found if (found := node.status()) and found["role"] == "unfit" else None)
    assert f"the take-over failed at step {step}: " in str(found["unfit_because"])
    assert node.service_pids() == []
    assert found["term"] is None


def test_a_lost_gpu_makes_the_node_unfit_and_a_standby_takes_over(make_node: Make) -> None:
    node, standby = make_node("n1"), make_node("n2")
    for bed in (node, standby):
        bed.add_service("one", *SLEEPER)
    node.start().until_leading()
    standby.start().until(standby.status)
    set_state(node.folder / "gpu", 0, verdict="lost")
    standby.until_leading()
    found = node.status()
    assert found is not None
    assert found["role"] == "unfit"
    assert "lost" in found["unfit_because"][0]
    assert node.service_pids() == []


def test_a_second_supervisor_with_the_same_run_folder_refuses_to_start(make_node: Make) -> None:
    node = make_node()
    node.start().until(node.status)
    twin = make_node("n1")
    twin.config["api"]["listen"] = f"127.0.0.1:{free_port()}"
    twin.start()
    assert twin.exit_code() == 1
    assert "another supervisor runs with the run folder" in twin.output()
    twin.process = None  # `end` is the first one's business


def test_a_second_supervisor_with_the_same_node_name_refuses_while_the_first_lives(make_node: Make) -> None:
    """Patroni 1804: two nodes with one name, both primary."""
    node = make_node()
    node.start().until_leading()
    twin = make_node("n1", folder="twin")
    twin.config["cgroup"] += "-twin"
    twin.start()
    assert twin.exit_code() == 1
    assert "another supervisor named 'n1' is alive" in twin.output()
    assert node.leads()


def test_a_service_that_survives_sigkill_keeps_lock_and_node_out_while_a_standby_takes_over(
    freezable: Path, make_node: Make
) -> None:
    """Rule 11; unsloth 3331: SIGKILL is pending, the rest is frozen, so it can do nothing: the end is recorded.

    nvidia-docker 1553, lotus 5958: the GPU is lost and the kill hangs; the node is unfit and stands down.
    """
    node, standby = make_node("n1"), make_node("n2")
    write = f"while :; do echo x >> {freezable}/file; done"
    node.add_service("stuck", "sh", "-c", write, gpu=0, lock="lifetime", gpu_fd="optional")
    standby.add_service("one", *SLEEPER)
    pid = node.start().until_leading()["services"][0]["pid"]
    standby.start().until(standby.status)
    fsfreeze("-f", freezable)
    try:
        node.until(lambda: (found := proc.stat(pid)) is not None and found.state == "D")
        set_state(node.folder / "gpu", 0, verdict="lost")
        standby.until_leading()
        status = node.until(lambda: (found := node.status()) and found["role"] == "unfit" and found)
        assert any("survived SIGKILL" in reason and str(pid) in reason for reason in status["unfit_because"])
        assert (node.run / "gpu-0.lock").exists()
    finally:
        fsfreeze("-u", freezable)
    node.until(lambda: gone(pid))
    set_state(node.folder / "gpu", 0, verdict="healthy")
    node.until(lambda: (found := node.status()) and found["role"] == "standby")


def test_weak_containment_that_is_not_allowed_keeps_the_node_from_leading(make_node: Make) -> None:
    node = make_node()
    mount = mount_point()
    assert mount is not None
    node.config["cgroup"] = "cgroup.procs"  # a file: no group can be made there
    node.start()
    reasons = node.until(lambda: (found := node.status()) and found["unfit_because"])
    assert "allow_weak_containment" in reasons[0]


def test_in_weak_containment_a_dead_keeper_leaves_no_proof_so_everybody_waits_the_term_out(make_node: Make) -> None:
    """Rule 8c goes by boot id alone there: a process that forked away may have outlived the keeper."""
    node = make_node()
    node.config |= {"cgroup": "cgroup.procs", "allow_weak_containment": True}
    node.add_service("one", *SLEEPER)
    first = node.start().until_leading()
    assert first["containment"] == "process-group"
    killed = time.monotonic()
    os.kill(node.keeper(), signal.SIGKILL)
    node.until(lambda: gone(first["services"][0]["pid"]))
    node.until(lambda: (found := node.status()) and found["term"] is None)
    second = node.until(lambda: s if (s := node.until_leading())["term"]["token"] > first["term"]["token"] else None)
    assert time.monotonic() - killed >= TTL - 1
    assert second["services"][0]["pid"] != first["services"][0]["pid"]
    assert "no orderly end is recorded" in node.output()


def test_an_etcd_that_is_not_there_is_named_with_the_reason_and_nothing_leads(make_node: Make) -> None:
    port = free_port()
    node = make_node(store="etcd", etcd={"endpoints": [f"http://127.0.0.1:{port}"]})
    node.add_service("one", *SLEEPER)
    node.start()
    alarm = node.until(lambda: (found := node.status()) and found["alarms"])[0]
    assert f"127.0.0.1:{port}" in alarm["text"]
    assert "connect call failed" in alarm["text"].lower()
    time.sleep(TTL + 2)  # what must not happen has no event
    assert not node.leads()
    assert node.service_pids() == []


def test_a_gateway_that_is_switched_off_is_told_with_the_name_of_the_flag(make_node: Make) -> None:
    with EtcdCluster(1, arguments=["--enable-grpc-gateway=false"]) as etcd:
        node = make_node(store="etcd", etcd={"endpoints": etcd.endpoints})
        node.start()
        alarm = node.until(lambda: (found := node.status()) and found["alarms"])[0]
        assert "--enable-grpc-gateway" in alarm["text"]


def test_the_holder_of_a_lock_that_is_kept_through_a_restart_is_shown_with_its_new_process(make_node: Make) -> None:
    node = make_node(ttl=LONG_TTL).after_an_orderly_end()
    node.add_service("owner", *SLEEPER, gpu=0, lock="lifetime", gpu_fd="optional")
    first = node.start().until_leading()
    held = first["gpus"][0]["lock"]["holder"]
    assert held["pid"] == first["services"][0]["pid"]
    os.kill(held["pid"], signal.SIGKILL)

    def shown() -> bool:
        status = node.status() or {"services": [{"pid": None}], "gpus": [{"lock": {"holder": None}}]}
        holder, pid = status["gpus"][0]["lock"]["holder"], status["services"][0]["pid"]
        return bool(
            holder and pid not in (None, held["pid"]) and holder["pid"] == pid and holder["since"] == held["since"]
        )

    node.until(shown)


def test_in_weak_containment_nobody_is_ended_for_knowing_the_run_folder(
    make_node: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """$GPUWARD_RUN_DIR is for people too: only what the keeper started has a token besides."""
    node = make_node(ttl=LONG_TTL).after_an_orderly_end()
    monkeypatch.setenv("GPUWARD_RUN_DIR", str(node.run))
    node.config |= {"cgroup": "cgroup.procs", "allow_weak_containment": True}
    node.add_service("one", *SLEEPER)
    with subprocess.Popen(["sleep", "1000"]) as bystander:
        try:
            node.start().until_leading()
            assert bystander.poll() is None
        finally:
            bystander.kill()


def test_in_weak_containment_a_restarted_supervisor_adopts_what_its_keeper_has(make_node: Make) -> None:
    node = make_node(ttl=LONG_TTL).after_an_orderly_end()
    node.config |= {"cgroup": "cgroup.procs", "allow_weak_containment": True}
    node.add_service("one", *SLEEPER)
    first = node.start().until_leading()
    node.kill()
    second = node.start().until_leading()
    assert second["term"]["token"] == first["term"]["token"]
    assert second["services"][0]["pid"] == first["services"][0]["pid"]
