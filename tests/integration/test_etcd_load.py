"""What a cluster of three nodes in peace asks of etcd, by etcd's own count."""

import re
import time
import urllib.request
from collections import Counter

from supervisor.demo.etcd_cluster import EtcdCluster
from tests.bed.nodes import LONG_TTL, Make

ENDED = '{"instance":"x","node":"x","ttl_s":90,"began":"then","ended":"then","because":"a test"}'
CALL = re.compile(
    r'^grpc_server_started_total\{grpc_method="(\w+)",grpc_service="etcdserverpb\.\w+"[^}]*\} (\S+)', re.MULTILINE
)
WINDOW = 40.0
"""Seconds."""


def started(etcd: EtcdCluster) -> Counter[str]:
    """Calls of all members since they began, by name."""
    calls: Counter[str] = Counter()
    for endpoint in etcd.endpoints:
        with urllib.request.urlopen(f"{endpoint}/metrics") as answer:
            for name, count in CALL.findall(answer.read().decode()):
                calls[name] += int(float(count))
    return calls


def test_three_nodes_in_peace_ask_etcd_less_than_once_a_second_and_make_no_watch_anew(
    make_node: Make, own_etcd: EtcdCluster
) -> None:
    """At the real times: reads each 5 s, refreshes each 60 s."""
    own_etcd.etcdctl("put", "/gpuward/test/term", ENDED)
    store = {"ttl": LONG_TTL, "store": "etcd", "etcd": {"endpoints": own_etcd.endpoints}}
    nodes = [make_node(f"n{number}", **store).start() for number in (1, 2, 3)]
    nodes[0].until(lambda: any(node.leads() for node in nodes))
    nodes[0].until(lambda: started(own_etcd)["Watch"] >= 3)
    before = started(own_etcd)
    time.sleep(WINDOW)
    during = started(own_etcd) - before
    assert during["Watch"] == 0
    assert 0 < during.total() <= WINDOW
