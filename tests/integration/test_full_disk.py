"""No room under logs and under state: a node goes on with what it has in memory, tells, and ends nothing healthy."""

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.bed.nodes import Make, NodeBed

SLEEPER = ("sleep", "1000")
WRITER = ("sh", "-c", "while :; do echo still here; sleep 0.05; done 2>/dev/null")
"""It does not end when it cannot write."""


@pytest.fixture
def small_disks(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """Two file systems of 256 KiB: for logs and for state."""
    folders = tmp_path / "logs", tmp_path / "states"
    mounted = []
    try:
        for folder in folders:
            folder.mkdir()
            command = ["mount", "-t", "tmpfs", "-o", "size=256k,mode=700", "tmpfs", str(folder)]
            if os.geteuid() != 0 or subprocess.run(command, check=False, capture_output=True).returncode != 0:
                pytest.skip("needs the right to mount a small tmpfs")
            mounted.append(folder)
        yield folders
    finally:
        for folder in mounted:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path) -> None:
    """Until not one byte more fits."""
    fd = os.open(folder / "filling", os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        for size in (4096, 1):
            try:
                while os.write(fd, bytes(size)):
                    pass
            except OSError:
                continue
    finally:
        os.close(fd)


def row(node: NodeBed, name: str) -> dict[str, Any]:
    rows = (node.status() or {"services": []})["services"]
    return next((row for row in rows if row["name"] == name), {"state": None, "pid": None})


def test_with_no_room_left_under_logs_and_state_services_run_restart_and_are_adopted(
    make_node: Make, small_disks: tuple[Path, Path]
) -> None:
    """mikopbx/Core 1051: disk full, a crash loop. Here: told, and everything goes on: the services, a restart of one of
    them, the refreshes of the term, the supervisor's own restart, and the next term."""
    node = make_node(ttl=30).after_an_orderly_end()
    node.config["paths"] |= {"log": str(small_disks[0]), "state": str(small_disks[1])}
    node.add_service("writer", *WRITER)
    node.add_service("sleeper", *SLEEPER)
    first = node.start().until_leading()
    pids = {row["name"]: row["pid"] for row in first["services"]}
    for folder in small_disks:
        fill(folder)

    os.kill(pids["sleeper"], signal.SIGKILL)
    node.until(lambda: (now := row(node, "sleeper"))["state"] == "running" and now["pid"] != pids["sleeper"])
    pids["sleeper"] = row(node, "sleeper")["pid"]

    node.kill()
    node.start()
    second = node.until_leading()
    assert second["term"]["token"] == first["term"]["token"]
    assert {row["name"]: row["pid"] for row in second["services"]} == pids

    node.lose_the_lock()
    third = node.until(
        lambda: (found := node.until_leading()) and found["term"]["token"] > first["term"]["token"] and found
    )
    told = [alarm["text"] for alarm in third["alarms"] if alarm["kind"] == "disk"]
    assert any("No space left" in text for text in told), third["alarms"]
    assert len(told) <= 6  # not once for each try
    assert {row["name"]: row["failures"] for row in third["services"]} == {"writer": 0, "sleeper": 1}

    (small_disks[0] / "filling").unlink()
    log = small_disks[0] / "writer.log"
    size = log.stat().st_size
    node.until(lambda: log.stat().st_size > size)  # the same process writes on, once it can
