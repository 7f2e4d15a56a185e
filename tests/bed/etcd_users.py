"""An etcd with users, as docs/etcd.md shows it."""

from pathlib import Path

from election.stores.etcd_access import Access
from supervisor.demo.etcd_cluster import EtcdCluster

ROOT, SECRET = "rootpass", "hunter2"
AS_ROOT = f"--user=root:{ROOT}"


def with_users(cluster: EtcdCluster, prefix: str) -> None:
    """Users are on; `gpuward` may use what is below the prefix, and nothing else."""
    cluster.etcdctl("user", "add", f"root:{ROOT}")
    cluster.etcdctl("user", "grant-role", "root", "root")
    cluster.etcdctl("role", "add", "gpuward")
    cluster.etcdctl("role", "grant-permission", "gpuward", "--prefix=true", "readwrite", prefix)
    cluster.etcdctl("user", "add", f"gpuward:{SECRET}")
    cluster.etcdctl("user", "grant-role", "gpuward", "gpuward")
    cluster.etcdctl("auth", "enable")


def password_file(folder: Path, password: str = SECRET) -> Path:
    path = folder / "etcd.password"
    path.write_text(f"{password}\n")
    path.chmod(0o600)
    return path


def as_user(folder: Path, password: str = SECRET) -> Access:
    return Access(user="gpuward", password_file=password_file(folder, password))
