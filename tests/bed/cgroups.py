"""A cgroup of its own for each test, below the cgroup2 mount; removed afterwards with all that the test put there."""

import os
import time
from collections.abc import Iterator

import pytest

from supervisor.cgroup import Group, mount_point
from tests.bed.keeper import PATIENCE

_count = 0


@pytest.fixture
def own_cgroup() -> Iterator[str]:
    """A path below the cgroup2 mount that nobody else uses; the group does not exist yet."""
    global _count
    mount = mount_point()
    if mount is None or not os.access(f"{mount}/cgroup.procs", os.W_OK):
        pytest.skip("needs a writable cgroup2 mount (root)")
    _count += 1
    path = f"/gpuward-test-{os.getpid()}-{_count}"
    yield path
    remove_group(path)


def remove_group(path: str) -> None:
    """Kill and remove a group with everything below it. Fails the test when something stays."""
    try:
        group = Group.open(path)
    except FileNotFoundError:
        return
    root = Group.open("/")
    try:
        end = time.monotonic() + PATIENCE
        group.kill()
        while not root.remove_child(path.strip("/")):
            assert time.monotonic() < end, f"{path} is still populated: {group.procs_below()}"
            time.sleep(0.005)
    finally:
        group.close()
        root.close()
