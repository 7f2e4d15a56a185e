"""A node whose surroundings are broken or misconfigured: it ends what it must, and never somebody else's."""

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from supervisor.cgroup import Group
from supervisor.demo.etcd_cluster import EtcdCluster
from supervisor.service.hand import ORDER_LIMIT
from tests.bed.nodes import LONG_TTL, TTL, Make, NodeBed, free_port, gone

SLEEPER = ("sleep", "1000")


@contextlib.contextmanager
def _lock_run(node: NodeBed, *command: str) -> Iterator["subprocess.Popen[bytes]"]:
    words = [sys.executable, "-m", "supervisor.entry", "lock", "run", "--run-dir", str(node.run), *command]
    with subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=-1, stderr=-1) as run:
        try:
            yield run
        finally:
            run.kill()


def test_with_a_hung_keeper_and_no_store_everything_is_gone_before_anybody_else_may_claim(make_node: Make) -> None:
    """Rule 16: the supervisor fences on the same schedule by itself; it waits for no answer of a keeper that hangs."""
    with EtcdCluster(1) as etcd:
        node = make_node(store="etcd", etcd={"endpoints": etcd.endpoints})
        node.add_service("one", "sh", "-c", "trap '' TERM; while :; do sleep 1; done", stop_timeout="60s")
        service = node.start().until_leading()["services"][0]["pid"]
        with _lock_run(node, "--gpu", "0", "--", "sleep", "1000") as job:
            node.until(lambda: (s := node.status()) and s["gpus"][0]["lock"]["holder"])
            keeper = node.keeper()
            os.kill(keeper, signal.SIGSTOP)
            etcd.stop(0)
            cut = time.monotonic()
            try:
                node.until(lambda: gone(service) and gone(job.pid))
                assert time.monotonic() - cut < TTL
            finally:
                etcd.cont(0)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(keeper, signal.SIGCONT)


def test_a_supervisor_without_a_free_file_descriptor_kills_no_healthy_service(make_node: Make) -> None:
    """What cannot be read is unknown, and unknown never kills."""
    node = make_node(ttl=LONG_TTL).after_an_orderly_end()  # not so soon is its lock lost for want of descriptors
    node.add_service("one", *SLEEPER)
    service = node.start().until_leading()["services"][0]["pid"]
    assert node.process is not None
    pid = node.process.pid
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    in_use = max(int(name) for name in os.listdir(f"/proc/{pid}/fd"))
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (in_use + 1, before[1]))
    time.sleep(2.5)  # two rounds and more: what must not happen has no event
    resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
    assert not gone(service), node.output()


def test_many_idle_connections_leave_the_supervisor_its_file_descriptors(make_node: Make) -> None:
    import socket

    node = make_node(ttl=LONG_TTL).after_an_orderly_end()
    node.add_service("one", *SLEEPER)
    service = node.start().until_leading()["services"][0]["pid"]
    host, port = node.config["api"]["listen"].split(":")
    with contextlib.ExitStack() as stack:
        for _ in range(600):
            idle = stack.enter_context(socket.socket())
            idle.settimeout(2)
            with contextlib.suppress(OSError):
                idle.connect((host, int(port)))
        fds = f"/proc/{node.process.pid if node.process else 0}/fd"
        node.until(lambda: len(os.listdir(fds)) < 250)
        time.sleep(2)  # two rounds of the watchdog
    node.until(node.leads)
    assert not gone(service)


def test_a_second_supervisor_with_the_same_cgroup_refuses_and_touches_nothing(make_node: Make) -> None:
    node, other = make_node("n1"), make_node("n2")
    node.add_service("one", *SLEEPER)
    service = node.start().until_leading()["services"][0]["pid"]
    other.config["cgroup"] = node.config["cgroup"]
    other.start()
    assert other.exit_code() == 1
    assert "another supervisor runs with the cgroup" in other.output()
    assert not gone(service)
    assert node.leads()


def test_a_second_supervisor_with_the_same_state_folder_refuses(make_node: Make) -> None:
    """The journal says which terms are this node's own: two nodes with one journal would each take the other's."""
    node, other = make_node("n1", ttl=LONG_TTL).after_an_orderly_end(), make_node("n2")
    node.start().until_leading()
    other.config["paths"]["state"] = node.config["paths"]["state"]
    other.start()
    assert other.exit_code() == 1
    assert "another supervisor runs with the state folder" in other.output()


def test_a_state_folder_handed_to_another_node_lets_it_take_nothing_early(make_node: Make) -> None:
    """Rule 8c holds for claims of this very node: what another home left running cannot be seen from here."""
    node, other = make_node("n1"), make_node("n2")
    node.add_service("one", *SLEEPER)
    node.start().until_leading()
    node.kill()
    died = time.monotonic()
    other.config["paths"]["state"] = node.config["paths"]["state"]
    other.start().until_leading()
    assert time.monotonic() - died >= TTL - 2  # from the last refresh, at most 1.5 s before the kill
    assert node.service_pids() == []


def test_what_an_earlier_run_left_is_ended_also_if_its_cgroup_was_changed_meanwhile(make_node: Make) -> None:
    node = make_node(ttl=LONG_TTL).after_an_orderly_end()
    node.add_service("one", *SLEEPER)
    service = node.start().until_leading()["services"][0]["pid"]
    keeper = node.keeper()
    node.kill()
    os.kill(keeper, signal.SIGKILL)
    node.config["cgroup"] += "-new"
    node.start().until_leading()
    assert gone(service)


def test_the_keeper_of_an_earlier_run_is_replaced_if_the_cgroup_was_changed(make_node: Make) -> None:
    node = make_node(ttl=LONG_TTL).after_an_orderly_end()
    node.add_service("one", *SLEEPER)
    first = node.start().until_leading()
    node.kill()
    node.config["cgroup"] += "-new"
    second = node.start().until_leading()
    assert gone(first["services"][0]["pid"])
    assert second["keeper"]["pid"] != first["keeper"]["pid"]


def test_a_node_whose_run_folder_was_deleted_comes_back_after_a_crash(make_node: Make) -> None:
    node = make_node()
    node.add_service("one", *SLEEPER)
    first = node.start().until_leading()
    node.run.rename(node.run.with_name("gone"))
    node.kill()
    node.start()
    second = node.until_leading()
    assert second["term"]["token"] > first["term"]["token"]
    assert gone(first["services"][0]["pid"])


def test_a_run_folder_in_which_nothing_can_be_written_is_told_in_one_line(make_node: Make) -> None:
    node = make_node()
    (node.run / "locks.json").mkdir(parents=True)  # a folder where a file must be written
    node.start()
    assert node.exit_code() == 1
    assert "Traceback" not in node.output()
    assert "locks.json" in node.output()


def test_a_folder_in_place_of_the_run_id_is_no_obstacle(make_node: Make) -> None:
    node = make_node(ttl=LONG_TTL).after_an_orderly_end()
    (node.run / "run-id").mkdir(parents=True)
    node.start().until_leading()


def test_a_token_floor_above_the_store_is_named_as_the_reason(make_node: Make) -> None:
    node = make_node()
    Path(node.config["paths"]["state"]).mkdir(parents=True)
    (Path(node.config["paths"]["state"]) / "floor.json").write_text('{"token": 10000000}')
    node.start()
    node.until(lambda: "floor.json" in " ".join((node.status() or {}).get("unfit_because", [])))


def test_a_port_that_is_taken_is_told_and_nothing_is_started(make_node: Make) -> None:
    import socket

    node = make_node()
    with socket.socket() as taken:
        port = free_port()
        taken.bind(("127.0.0.1", port))
        taken.listen()
        node.config["api"]["listen"] = f"127.0.0.1:{port}"
        node.start()
        assert node.exit_code() == 1
    assert f"cannot listen on 127.0.0.1:{port}" in node.output()
    assert node.service_pids() == []


def test_an_orderly_stop_keeps_nobody_out_and_says_why_it_ended(make_node: Make) -> None:
    """The refresh that says "standing-down" may be answered after the end: there is no deadline to move then."""
    with EtcdCluster(1) as etcd:
        node = make_node(store="etcd", etcd={"endpoints": etcd.endpoints})
        node.add_service("one", *SLEEPER)
        for _ in range(6):
            token = node.start().until_leading()["term"]["token"]
            node.signal(signal.SIGTERM)
            assert node.exit_code() == 0
            assert not (node.run / "stay-out.json").exists()
            history = json.loads(etcd.etcdctl("get", "--print-value-only", f"/gpuward/test/history/{token}"))
            assert history["because"] == "got SIGTERM"
        assert '"kind": "fenced"' not in node.output()


def test_a_gpu_that_is_not_configured_is_a_usage_error_whoever_leads(make_node: Make) -> None:
    """A caller that tries again on 75 would go on for ever on a misspelt index."""
    node = make_node()
    node.start().until(node.status)
    with _lock_run(node, "--gpu", "7", "--", "true") as refused:
        assert b"no-such-gpu" in refused.communicate()[1]
    assert refused.returncode == 64


def test_a_term_that_is_lost_again_and_again_leaves_every_service_fit_for_the_next(
    make_node: Make, own_etcd: EtcdCluster
) -> None:
    """The keeper forgets the services of a term that ends, so nobody is told that each is empty."""
    node = make_node(store="etcd", etcd={"endpoints": own_etcd.endpoints})
    for name in ("one", "two", "three", "four"):
        node.add_service(name, *SLEEPER)
    tokens = [node.start().until_leading()["term"]["token"]]
    for _ in range(8):
        own_etcd.etcdctl("del", "/gpuward/test/leader")
        found = node.until(lambda: s if (s := node.until_leading())["term"]["token"] > tokens[-1] else None)
        tokens.append(found["term"]["token"])
        assert not found["unfit_because"]
    assert "quarantined" not in node.output()


def test_groups_as_deep_as_a_term_allows_are_removed(own_cgroup: str) -> None:
    group = Group.open(own_cgroup, make=True)
    try:
        path = "deep"
        for _ in range(200):
            os.mkdir(path, dir_fd=group.fd)
            path += "/d"
        assert len(group.children()) == 1
        assert group.remove_child("deep")
        assert group.children() == []
    finally:
        group.close()


def test_a_node_whose_timers_were_too_late_for_its_ttl_claims_nothing_and_says_so(make_node: Make) -> None:
    """Rule 22: the keeper stood still for half a second, which a TTL of 6 s does not allow for."""
    node = make_node()
    first = node.start().until_leading()
    keeper, term = first["keeper"]["pid"], first["term"]["token"]

    def slow() -> list[str]:
        os.kill(keeper, signal.SIGSTOP)
        time.sleep(0.6)
        os.kill(keeper, signal.SIGCONT)
        time.sleep(1.1)  # a keeper that was just woken for something else measures at its next timer
        return [why for why in (node.status() or {})["unfit_because"] if "tick " in why]

    why = node.until(slow)[0]
    assert "must not exceed TTL 6" in why
    assert "election.ttl" in why
    assert (node.status() or {})["term"]["token"] == term  # the term it has goes on
    node.signal(signal.SIGTERM)
    assert node.exit_code() == 0


@pytest.mark.parametrize("after", [0.0, 2.5], ids=["at-once", "after-2.5-s"])
def test_a_supervisor_that_comes_back_to_a_hung_keeper_replaces_it_and_never_two(make_node: Make, after: float) -> None:
    """Rule 16: a keeper that hangs carries out no switch, so whoever comes back must not wait for it."""
    node, standby = make_node("n1", ttl=LONG_TTL), make_node("n2", ttl=LONG_TTL)
    for bed in (node, standby):
        bed.add_service("one", *SLEEPER)
    node.after_an_orderly_end().start().until_leading()
    standby.start().until(standby.status)
    keeper = node.keeper()
    node.kill()
    os.kill(keeper, signal.SIGSTOP)
    time.sleep(after)
    node.start()
    both = []

    def one_leads_with_a_healthy_keeper() -> bool:
        if node.service_pids() and standby.service_pids():
            both.append(time.monotonic())
        return gone(keeper) and (node.leads() or standby.leads())

    node.until(one_leads_with_a_healthy_keeper)
    for _ in range(50):
        one_leads_with_a_healthy_keeper()
        time.sleep(0.02)
    assert both == []


def test_a_node_that_stands_down_beside_a_hung_keeper_leads_again_after_its_start(make_node: Make) -> None:
    node = make_node().after_an_orderly_end()  # it waits its term out
    node.add_service("one", *SLEEPER)
    node.start().until_leading()
    keeper = node.keeper()
    os.kill(keeper, signal.SIGSTOP)
    node.signal(signal.SIGTERM)
    assert node.exit_code() == 0
    node.start().until_leading()
    assert gone(keeper)


@pytest.mark.parametrize("what", ["log", "env_file"])
def test_one_service_whose_files_are_fifos_fails_alone_and_at_once(make_node: Make, what: str) -> None:
    """A service that cannot be started never fails a take-over, and does not delay it."""
    node = make_node(ttl=LONG_TTL).after_an_orderly_end()
    node.add_service("fine", *SLEEPER)
    node.add_service("odd", *SLEEPER, restart={"backoff": ["1m"]})
    fifo = node.folder / "log" / "odd.log" if what == "log" else node.folder / "odd.env"
    fifo.parent.mkdir(exist_ok=True)
    os.mkfifo(fifo)
    if what == "env_file":
        node.config["services"]["odd"]["env_file"] = str(fifo)
    node.start()

    def states() -> dict[str, str]:
        return {row["name"]: row["state"] for row in (node.status() or {"services": []})["services"]}

    node.until(lambda: node.leads() and states() == {"fine": "running", "odd": "backoff"})
    assert (node.status() or {})["takeovers"][0]["work_s"] < ORDER_LIMIT
    why = next(row["why"] for row in (node.status() or {})["services"] if row["name"] == "odd")
    assert "No such device" in why or "not a regular file" in why


def test_with_a_full_state_folder_a_node_leads_all_the_same_and_says_so_once(make_node: Make, small_disk: Path) -> None:
    """mikopbx 1051: it runs on in memory, and tells."""
    node = make_node(ttl=LONG_TTL).after_an_orderly_end()
    node.config["paths"]["state"] = str(small_disk)
    node.add_service("one", *SLEEPER)
    with contextlib.suppress(OSError), (small_disk / "filling").open("wb") as filling:
        while True:
            filling.write(bytes(4096))
            filling.flush()
    node.start().until_leading()
    alarms = [row for row in (node.status() or {})["alarms"] if row["kind"] == "disk"]
    assert 1 <= len(alarms) <= 3
    assert "No space left" in alarms[0]["text"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_the_keeper_has_real_time_priority_and_its_services_have_not(make_node: Make) -> None:
    node = make_node(ttl=LONG_TTL).after_an_orderly_end()
    node.add_service("one", *SLEEPER)
    status = node.start().until_leading()
    if os.sched_getscheduler(status["keeper"]["pid"]) != os.SCHED_RR | os.SCHED_RESET_ON_FORK:
        pytest.skip("no real-time priority is allowed here (CAP_SYS_NICE, or the cgroup's real-time budget)")
    assert os.sched_getscheduler(status["services"][0]["pid"]) == os.SCHED_OTHER
