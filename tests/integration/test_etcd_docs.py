"""The commands of docs/etcd.md, run as they stand on a real etcd."""

import os
import re
import shlex
import subprocess
from collections.abc import Mapping
from pathlib import Path

from supervisor.demo.etcd_cluster import find_binaries
from tests.bed.certificates import Authority
from tests.bed.etcd import etcd_cluster
from tests.bed.nodes import LONG_TTL, Make

PAGE = Path(__file__).parents[2] / "docs/etcd.md"
ENDED = '{"instance":"x","node":"x","ttl_s":90,"began":"then","ended":"then","because":"a test"}'


def commands(heading: str, where: Mapping[str, str]) -> list[str]:
    """The lines in the shell blocks below a heading, with other places."""
    section = PAGE.read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for block in re.findall(r"```sh\n(.*?)```", section, re.DOTALL) for line in block.splitlines()]
    for old, new in where.items():
        lines = [line.replace(old, new) for line in lines]
    return lines


def run(line: str, environment: Mapping[str, str]) -> None:
    done = subprocess.run(["sh", "-eu", "-c", line], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, f"{line}\n{done.stderr}"


def test_the_commands_make_an_etcd_on_which_a_node_leads_and_get_it_out_of_space_and_backed_up(
    tmp_path: Path, make_node: Make
) -> None:
    authority = Authority(tmp_path / "ca")
    authority.issue("member")
    ours = authority.issue("etcd")
    for name in ("etcd-root", "etcd"):
        (tmp_path / f"{name}.password").write_text(f"secret-of-{name}\n")
        (tmp_path / f"{name}.password").chmod(0o600)
    where = {
        "/etc/etcd/": f"{authority.folder}/",
        "/etc/gpuward/etcd.password": f"{tmp_path}/etcd.password",
        "/root/": f"{tmp_path}/",
        "/var/": f"{tmp_path}/",
        "/gpuward/prod/": "/gpuward/test/",
    }
    (etcd,) = commands("Members", where)
    with etcd_cluster(1, shlex.split(etcd)[1:], tls=ours) as cluster:
        environment = {
            "PATH": f"{find_binaries()}:{os.environ['PATH']}",
            "ETCDCTL_ENDPOINTS": cluster.endpoints[0],
            "ETCDCTL_CACERT": str(ours.ca),
            "ETCDCTL_CERT": str(ours.cert),
            "ETCDCTL_KEY": str(ours.key),
        }
        cluster.etcdctl("put", "/gpuward/test/term", ENDED)
        *users, change_password = commands("User and role", where)
        for line in users:
            run(line, environment)
        files = {"ca_file": ours.ca, "cert_file": ours.cert, "key_file": ours.key}
        access = {name: str(path) for name, path in files.items()} | {"user": "gpuward"}
        access["password_file"] = str(tmp_path / "etcd.password")
        node = make_node(ttl=LONG_TTL, store="etcd", etcd={"endpoints": cluster.endpoints, **access})
        node.start().until_leading()
        environment["ETCDCTL_USER"] = "root:secret-of-etcd-root"
        (tmp_path / "backups").mkdir()
        (tmp_path / "lib").mkdir()
        for line in [change_password, *commands("Space", where), *commands("Backup and restore", where)]:
            run(line, environment)
        assert (tmp_path / "lib/etcd-restored/member").is_dir()
        assert node.leads()
