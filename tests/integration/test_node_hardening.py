"""A node whose surroundings are broken or misconfigured: it ends what it must, and never somebody else's."""

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

from supervisor.cgroup import Group
from supervisor.demo.etcd_cluster import EtcdCluster
from tests.bed.nodes import TTL, Make, NodeBed, free_port, gone

SLEEPER = ("sleep", "1000")
REFRESH = 1.5
SWITCH = TTL - 0.5
"""Seconds after the last refresh by which nothing may run any more (election.timing, TTL 6)."""


def _lock_run(node: NodeBed, *command: str) -> "subprocess.Popen[bytes]":
    words = [sys.executable, "-m", "supervisor.entry", "lock", "run", "--run-dir", str(node.run), *command]
    return subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_with_a_hung_keeper_and_no_store_everything_is_gone_before_the_switch(make_node: Make) -> None:
    """Rule 16: the supervisor fences on the same schedule by itself; it waits for no answer of a keeper that hangs."""
    with EtcdCluster(1) as etcd:
        node = make_node(store="etcd", etcd={"endpoints": etcd.endpoints})
        node.add_service("one", "sh", "-c", "trap '' TERM; while :; do sleep 1; done", stop_timeout="60s")
        service = node.start().until_leading()["services"][0]["pid"]
        job = _lock_run(node, "--gpu", "0", "--", "sleep", "1000")
        node.until(lambda: (s := node.status()) and s["gpus"][0]["lock"]["holder"])
        keeper = node.keeper()
        os.kill(keeper, signal.SIGSTOP)
        etcd.stop(0)
        cut = time.monotonic()
        try:
            node.until(lambda: gone(service) and gone(job.pid), within=SWITCH + 0.2)
            assert time.monotonic() - cut <= SWITCH - REFRESH  # the last refresh was up to REFRESH before the cut
        finally:
            etcd.cont(0)
            with contextlib.suppress(ProcessLookupError):
                os.kill(keeper, signal.SIGCONT)
            job.kill()
            job.communicate()


def test_a_silent_keeper_is_replaced_once_its_term_has_ended(make_node: Make) -> None:
    node = make_node()
    node.add_service("one", *SLEEPER)
    first = node.start().until_leading()
    os.kill(first["keeper"]["pid"], signal.SIGSTOP)
    node.until(lambda: gone(first["services"][0]["pid"]), within=5)
    second = node.until(lambda: s if (s := node.until_leading())["term"]["token"] > first["term"]["token"] else None)
    assert second["keeper"]["pid"] != first["keeper"]["pid"]
    assert gone(first["keeper"]["pid"])  # one that is continued later finds nothing to do: it is dead


def test_a_supervisor_without_a_free_file_descriptor_kills_no_healthy_service(make_node: Make) -> None:
    """What cannot be read is unknown, and unknown never kills."""
    node = make_node()
    node.add_service("one", *SLEEPER)
    service = node.start().until_leading()["services"][0]["pid"]
    assert node.process is not None
    pid = node.process.pid
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    in_use = max(int(name) for name in os.listdir(f"/proc/{pid}/fd"))
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (in_use + 1, before[1]))
    time.sleep(2.5)  # two rounds and more: what must not happen has no event. Longer, and the lock itself would be lost
    resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
    assert not gone(service)


def test_many_idle_connections_leave_the_supervisor_its_file_descriptors(make_node: Make) -> None:
    import socket

    node = make_node()
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
    node, other = make_node("n1"), make_node("n2")
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
    node = make_node()
    node.add_service("one", *SLEEPER)
    service = node.start().until_leading()["services"][0]["pid"]
    keeper = node.keeper()
    node.kill()
    os.kill(keeper, signal.SIGKILL)
    node.config["cgroup"] += "-new"
    node.start().until_leading()
    assert gone(service)


def test_the_keeper_of_an_earlier_run_is_replaced_if_the_cgroup_was_changed(make_node: Make) -> None:
    node = make_node()
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
    second = node.until_leading(within=5 * TTL)
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
    node = make_node()
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
    refused = _lock_run(node, "--gpu", "7", "--", "true")
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
        return [why for why in (node.status() or {})["unfit_because"] if "tick 0." in why]

    why = node.until(slow)[0]
    assert "must not exceed TTL 6" in why
    assert "election.ttl" in why
    assert (node.status() or {})["term"]["token"] == term  # the term it has goes on
    node.signal(signal.SIGTERM)
    assert node.exit_code() == 0
