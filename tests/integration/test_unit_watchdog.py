"""What systemd hears of a supervisor whose unit has Type=notify and WatchdogSec (sd_watchdog_enabled(3))."""

import contextlib
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.bed.keeper import PATIENCE
from tests.bed.nodes import LONG_TTL, Make


@pytest.fixture
def heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """systemd's end."""
    path = tmp_path / "systemd"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(path))
        sock.settimeout(PATIENCE)
        monkeypatch.setenv("NOTIFY_SOCKET", str(path))
        monkeypatch.setenv("WATCHDOG_USEC", "600000")
        yield sock


def test_systemd_hears_that_it_is_up_that_it_lives_and_that_it_goes(make_node: Make, heard: socket.socket) -> None:
    node = make_node(ttl=LONG_TTL).after_an_orderly_end()
    node.add_service("deaf", "sh", "-c", "trap '' TERM; while :; do sleep 1; done")
    node.start()
    assert heard.recv(4096).startswith(b"READY=1\nSTATUS=n1 is up")
    node.until_leading()
    assert heard.recv(4096) == b"WATCHDOG=1"
    assert heard.recv(4096) == b"WATCHDOG=1"
    node.signal(signal.SIGSTOP)
    heard.settimeout(1.5)
    with contextlib.suppress(TimeoutError):
        for _ in range(3):  # what was sent before
            heard.recv(4096)
        pytest.fail("a stopped supervisor says that it lives")
    node.signal(signal.SIGCONT)
    heard.settimeout(PATIENCE)
    assert heard.recv(4096) == b"WATCHDOG=1"
    node.signal(signal.SIGTERM)
    said = [heard.recv(4096)]
    while said[-1] != b"STOPPING=1":
        said.append(heard.recv(4096))
    assert node.service_pids(), "it says so before it begins to stand down"
    assert node.exit_code() == 0


def test_a_watchdog_that_is_meant_for_another_process_is_not_answered(
    make_node: Make, heard: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()))
    node = make_node(ttl=LONG_TTL).start()
    assert heard.recv(4096).startswith(b"READY=1")
    node.until(node.status)
    node.signal(signal.SIGTERM)
    assert heard.recv(4096) == b"STOPPING=1"
