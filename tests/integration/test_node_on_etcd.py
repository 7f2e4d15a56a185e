"""A whole node on real etcd: what stands there for `etcdctl`, and what happens when somebody writes nonsense there."""

import json
from typing import Any

from supervisor.demo.etcd_cluster import EtcdCluster
from tests.bed.nodes import TTL, Make

LEADER = {
    "node",
    "instance",
    "token",
    "state",
    "since",
    "renewed_at",
    "nonce",
    "lease_ttl_s",
    "url",
    "version",
}
TERM = {"instance", "node", "ttl_s", "began", "ended", "because"}


def _etcdctl_get(etcd: EtcdCluster, prefix: str) -> dict[str, Any]:
    lines = etcd.etcdctl("get", "--prefix", prefix).splitlines()
    return {key: json.loads(value) for key, value in zip(lines[::2], lines[1::2], strict=True)}


def test_etcdctl_shows_leader_term_members_and_history_as_json(make_node: Make, own_etcd: EtcdCluster) -> None:
    node = make_node(store="etcd", etcd={"endpoints": own_etcd.endpoints})
    node.add_service("one", "sleep", "1000", env={"SECRET_TOKEN": "hunter2"})
    status = node.start().until_leading()
    token = status["term"]["token"]
    node.until(lambda: f"/gpuward/test/history/{token}" in _etcdctl_get(own_etcd, "/gpuward/test/"))
    found = node.until(lambda: _once_active(_etcdctl_get(own_etcd, "/gpuward/test/")))
    leader, term = found["/gpuward/test/leader"], found["/gpuward/test/term"]
    assert set(leader) == LEADER
    assert (leader["node"], leader["token"], leader["state"], leader["lease_ttl_s"]) == ("n1", token, "active", TTL)
    assert set(term) == TERM
    assert (term["node"], term["instance"], term["ttl_s"], term["ended"]) == ("n1", leader["instance"], TTL, None)
    assert found["/gpuward/test/members/n1"]["boot_id"]
    assert found[f"/gpuward/test/history/{token}"]["steps"]
    everything = json.dumps(found)
    assert "hunter2" not in everything
    assert "sleep" not in everything  # no command, environment, path or user ever stands in the store
    assert str(node.folder) not in everything


def _once_active(found: dict[str, Any]) -> dict[str, Any] | None:
    member = found.get("/gpuward/test/members/n1", {})
    return found if found["/gpuward/test/leader"]["state"] == "active" and member.get("role") == "leader" else None


def test_damaged_records_raise_an_alarm_count_as_unchanged_and_are_replaced_by_a_lawful_claim(
    make_node: Make, own_etcd: EtcdCluster
) -> None:
    own_etcd.etcdctl("put", "/gpuward/test/leader", "not json at all")
    own_etcd.etcdctl("put", "/gpuward/test/term", '{"instance": 7}')
    node = make_node(store="etcd", etcd={"endpoints": own_etcd.endpoints})
    node.start()
    alarms = node.until(lambda: (s := node.status()) and [a for a in s["alarms"] if a["kind"] == "damaged-record"])
    texts = " ".join(alarm["text"] for alarm in alarms)
    assert "/gpuward/test/leader" in texts
    assert "/gpuward/test/term: instance" in texts or "/gpuward/test/term" in texts
    node.until_leading()
    assert f"nobody has refreshed for {TTL} s (8b)" in node.output()  # what cannot be read is no orderly end
    assert len([a for a in (node.status() or {})["alarms"] if a["kind"] == "damaged-record"]) == len(alarms)
    assert _etcdctl_get(own_etcd, "/gpuward/test/term")["/gpuward/test/term"]["node"] == "n1"


def test_a_leader_key_deleted_by_hand_ends_the_term_at_once_and_a_new_one_follows(
    make_node: Make, own_etcd: EtcdCluster
) -> None:
    node = make_node(store="etcd", etcd={"endpoints": own_etcd.endpoints})
    node.add_service("one", "sleep", "1000")
    first = node.start().until_leading()["term"]["token"]
    own_etcd.etcdctl("del", "/gpuward/test/leader")
    second = node.until(lambda: s if (s := node.until_leading())["term"]["token"] > first else None)
    assert any(alarm["kind"] == "fenced" and "gone" in alarm["text"] for alarm in second["alarms"])


def test_a_second_node_of_the_same_name_on_etcd_refuses(make_node: Make, own_etcd: EtcdCluster) -> None:
    """Patroni 1804."""
    settings = {"store": "etcd", "etcd": {"endpoints": own_etcd.endpoints}}
    node = make_node(**settings)
    node.start().until_leading()
    twin = make_node("n1", folder="twin", **settings)
    twin.config["cgroup"] += "-twin"
    twin.start()
    assert twin.exit_code() == 1
    assert "another supervisor named 'n1' is alive" in twin.output()
    assert node.leads()
