"""Starting, watching and ending services; what the keeper does with nonsense, and with what cannot be ended."""

import asyncio
import contextlib
import errno
import json
import os
import random
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from supervisor import proc
from supervisor.cgroup import Group, mount_point
from supervisor.keeper.client import KeeperGone, KeeperRefused
from supervisor.keeper.protocol import CONTROL_SOCKET, JOB_SOCKET
from tests.bed.freezable import fsfreeze
from tests.bed.keeper import NOBODY, PATIENCE, Bed, ended, pid_from, soon, until


async def test_a_service_starts_clean_in_a_leaf_of_its_own(keeper: Bed) -> None:
    await keeper.arm(1)
    script = (
        "ls /proc/self/fd | wc -l; cat /proc/self/cgroup | grep ^0; grep -E 'SigIgn|SigBlk' /proc/self/status; umask"
    )
    started = await keeper.start(1, "s", "sh", "-c", script)
    await keeper.event("exited", service="s", pid=started["pid"], status=0)
    await keeper.event("empty", service="s")
    lines = (keeper.run / "s.log").read_text().split("\n")
    assert lines[0] == "4"  # 0, 1, 2 and the folder that ls reads
    assert lines[1] == f"0::{keeper.cgroup}/term-1/s/main"
    # make(1) starts its recipes with glibc's own signals 32 and 33 ignored; nobody but glibc may touch those.
    glibc = 1 << 31 | 1 << 32
    assert [int(line.split()[1], 16) & ~glibc for line in lines[2:4]] == [0, 0]
    assert (keeper.run / "s.log").stat().st_mode & 0o777 == 0o640


async def test_privileges_are_dropped_and_the_session_is_its_own(keeper: Bed) -> None:
    await keeper.arm(1)
    started = await keeper.start(
        1, "s", "sh", "-c", "id -u; id -g; id -G; sleep 60", uid=NOBODY, gid=NOBODY, groups=[4]
    )
    log = keeper.run / "s.log"
    await until(lambda: log.read_text().count("\n") == 3, "three lines")
    assert log.read_text().split("\n")[:3] == ["65534", "65534", "65534 4"]
    found = proc.stat(started["pid"])
    assert found is not None
    assert found.session == started["pid"]


@pytest.mark.parametrize(
    ("changes", "stage", "code"),
    [
        ({"argv": ["no-such-command"]}, "exec", errno.ENOENT),
        ({"argv": ["/etc/passwd"]}, "exec", errno.EACCES),
        ({"cwd": "/no/such/folder"}, "cwd", errno.ENOENT),
        ({"log": "/no/such/folder/log"}, "log", errno.ENOENT),
        ({"log": "/proc/self/exe"}, "log", errno.ELOOP),
    ],
)
async def test_a_start_that_fails_says_at_which_stage_and_why(
    any_keeper: Bed, changes: dict[str, object], stage: str, code: int
) -> None:
    await any_keeper.arm(1)
    await any_keeper.give_lock(1)
    fields: dict[str, Any] = {"argv": ["true"], "env": {}, "cwd": "/", "log": None, "lock": 0, **changes}
    with pytest.raises(KeeperRefused) as refused:
        await any_keeper.call("start", token=1, service="s", **fields)
    assert refused.value.error == "exec"
    assert (refused.value.fields["stage"], refused.value.fields["errno"]) == (stage, code)
    await any_keeper.call("hello")
    assert not any(event["event"] == "exited" for event in any_keeper.events)  # it never was a service
    assert (await any_keeper.start(1, "s", "sh", "-c", "exit 3", lock=0))["pid"] > 0  # the lock is free again
    await any_keeper.event("exited", service="s", status=3 << 8)


async def test_fifty_services_start_side_by_side(any_keeper: Bed) -> None:
    await any_keeper.arm(1)
    await asyncio.gather(*(any_keeper.start(1, f"s{number}", "sleep", "60") for number in range(50)))
    hello = await any_keeper.call("hello")
    assert sum(service["running"] for service in hello["services"].values()) == 50
    assert hello["memory_locked"] is True or hello["memory_not_locked_because"]


async def test_starting_what_runs_is_refused_and_leaves_it_alone(any_keeper: Bed) -> None:
    await any_keeper.arm(1)
    started = await any_keeper.start(1, "s", "sleep", "60")
    with pytest.raises(KeeperRefused) as refused:
        await any_keeper.start(1, "s", "sleep", "60")
    assert (refused.value.error, refused.value.fields["pid"]) == ("running", started["pid"])


async def test_a_killed_service_starts_again_at_once(any_keeper: Bed) -> None:
    """A cgroup that was killed once kills what is born into it (kill_seq): the next start needs a fresh one."""
    await any_keeper.arm(1)
    for _ in range(3):
        any_keeper.events.clear()
        started = await any_keeper.start(1, "s", "sleep", "60")
        await any_keeper.call("kill", service="s")
        await any_keeper.event("exited", service="s", pid=started["pid"], status=signal.SIGKILL)
        await any_keeper.event("empty", service="s")
    await any_keeper.start(1, "s", "sh", "-c", "exit 0")
    await any_keeper.event("exited", service="s", status=0)
    await any_keeper.call("remove", service="s")


async def test_services_start_also_when_the_keeper_stands_in_a_group_that_was_killed_once(keeper: Bed) -> None:
    """Linux 6.18 kills at birth what such a keeper starts by CLONE_INTO_CGROUP."""
    assert keeper.cgroup is not None
    home = Group.open(keeper.cgroup + "-home", make=True)
    root = Group.open("/")
    try:
        home.kill()
        home.enter(keeper.pid)
        await keeper.arm(1)
        await keeper.start(1, "s", "sh", "-c", "grep ^0 /proc/self/cgroup")
        await keeper.event("exited", service="s", status=0)
        assert (keeper.run / "s.log").read_text() == f"0::{keeper.cgroup}/term-1/s/main\n"
    finally:
        root.enter(keeper.pid)
        await until(lambda: root.remove_child(home.path.strip("/")), "the group to go")
        home.close()
        root.close()


async def test_a_signal_reaches_every_process_of_the_service_and_no_other(any_keeper: Bed) -> None:
    await any_keeper.arm(1)
    other = await any_keeper.start(1, "other", "sleep", "60")
    file = any_keeper.run / "child"
    await any_keeper.start(1, "s", "sh", "-c", f"(setsid sh -c 'echo $$ > {file}; exec sleep 60' &); exec sleep 60")
    pid, ticks = await pid_from(file)
    await until(lambda: (found := proc.stat(pid)) is not None and found.comm == "sleep", "exec")
    answer = await any_keeper.call("signal", service="s", signal=signal.SIGTERM)
    assert answer["signalled"] >= 2
    await ended(pid, ticks)
    await any_keeper.event("empty", service="s")
    assert proc.stat(other["pid"]) is not None


async def test_empty_waits_for_the_last_grandchild(any_keeper: Bed) -> None:
    """Supervisor 1101: grandchildren outlived the kill."""
    await any_keeper.arm(1)
    file = any_keeper.run / "child"
    await any_keeper.start(1, "s", "sh", "-c", f"(setsid sh -c 'echo $$ > {file}; exec sleep 60' &); exit 0")
    await any_keeper.event("exited", service="s")
    pid, ticks = await pid_from(file)
    with pytest.raises(KeeperRefused) as refused:
        await any_keeper.call("remove", service="s")
    assert refused.value.error == "not-empty"
    assert proc.kill(pid, ticks)
    await any_keeper.event("empty", service="s")


async def test_a_child_that_hangs_before_its_exec_blocks_nobody(keeper: Bed, freezable: Path) -> None:
    """A log on a dead disk: here on a frozen file system."""
    await keeper.arm(1)
    fsfreeze("-f", freezable)
    hanging = asyncio.create_task(keeper.start(1, "s", "true", log=str(freezable / "s.log")))
    await keeper.start(1, "t", "true")
    await keeper.event("exited", service="t", status=0)
    assert not hanging.done()
    await keeper.call("kill", service="s")
    fsfreeze("-u", freezable)
    with contextlib.suppress(KeeperRefused):
        await hanging
    assert (await keeper.call("hello"))["armed"]["token"] == 1


async def test_malformed_packets_get_an_error_and_harm_nobody(any_keeper: Bed) -> None:
    await any_keeper.arm(1)
    await any_keeper.start(1, "good", "sleep", "60")
    await any_keeper.client.close()
    chance = random.Random(20)
    values: list[object] = [None, True, -1, 2**70, 1.5, "", "x\0y", [], {}, [None], "a" * 5000, {"a": 1}]
    keys = [
        "token",
        "deadline_ns",
        "service",
        "argv",
        "env",
        "cwd",
        "uid",
        "gid",
        "groups",
        "log",
        "lock",
        "locks",
        "signal",
    ]
    ops = ["hello", "arm", "locks", "start", "signal", "kill", "release", "remove", "end", "enter", "leave", None, 7]
    packets = [b"{", b"\xff\xfe", b"null", b"[" * 5000, b'{"op": "hello"', b"0" * 100_000, b'"text"']
    for _ in range(300):
        request = {key: chance.choice(values) for key in chance.sample(keys, chance.randint(0, 8))}
        packets.append(json.dumps({"op": chance.choice(ops), "id": chance.choice(values), **request}).encode())
    for name in (CONTROL_SOCKET, JOB_SOCKET):
        await asyncio.to_thread(_throw, any_keeper.run / name, packets)
    await any_keeper.reconnect()
    hello = await any_keeper.call("hello")
    assert hello["services"]["good"]["running"] is True
    assert (hello["armed"]["token"], hello["over"]) == (1, 0)
    assert "Traceback" not in any_keeper.log()


def _throw(path: Path, packets: list[bytes]) -> None:
    """Send each, with an fd beside every third, and read the answers."""
    sock = None
    for number, packet in enumerate(packets):
        if sock is None:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            sock.settimeout(PATIENCE)
            sock.connect(os.fspath(path))
        try:
            socket.send_fds(sock, [packet], [0] if number % 3 == 0 else [])
            answer = sock.recv(300_000)
        except (BrokenPipeError, ConnectionResetError):
            answer = b""
        if not answer:
            sock.close()
            sock = None
        else:
            assert isinstance(json.loads(answer)["ok"], bool)
    if sock is not None:
        sock.close()


async def test_the_newest_connection_is_the_supervisor(keeper: Bed) -> None:
    first = keeper.client
    await keeper.reconnect()
    await asyncio.wait_for(first.closed.wait(), PATIENCE)
    with pytest.raises(KeeperGone):
        await first.call("hello", deadline=soon())
    assert (await keeper.call("hello"))["pid"] == keeper.pid


async def test_a_stopped_keeper_is_a_keeper_that_is_gone_by_the_deadline(keeper: Bed) -> None:
    os.kill(keeper.pid, signal.SIGSTOP)
    try:
        with pytest.raises(KeeperGone, match="no answer"):
            await keeper.client.call("hello", deadline=soon(0.2))
    finally:
        os.kill(keeper.pid, signal.SIGCONT)


async def test_quit_is_refused_while_a_term_is_armed_and_so_is_sigterm(keeper: Bed) -> None:
    await keeper.arm(1)
    with pytest.raises(KeeperRefused) as refused:
        await keeper.call("quit")
    assert refused.value.error == "armed"
    os.kill(keeper.pid, signal.SIGTERM)
    await until(lambda: "not before it has ended" in keeper.log(), "the line in the log")
    assert (await keeper.call("hello"))["armed"]["token"] == 1


async def test_the_keeper_stays_below_20_mb_with_its_memory_locked(keeper: Bed) -> None:
    hello = await keeper.call("hello")
    assert hello["memory_locked"] is True
    assert hello["rss_bytes"] <= 20_000_000


async def test_an_unkillable_process_is_named_frozen_and_keeps_its_lock(keeper: Bed, freezable: Path) -> None:
    """unsloth 3331, crun 868: SIGKILL has no effect. Bounded, reported, the lock kept, and no later term beside it."""
    await keeper.arm(1)
    path = await keeper.give_lock(1)
    stuck = await keeper.start(1, "s", "sh", "-c", f"exec 3>&-; while :; do echo x >> {freezable}/file; done", lock=0)
    await until((freezable / "file").exists, "the first write")
    await asyncio.to_thread(fsfreeze, "-f", freezable)
    try:
        await until(lambda: (found := proc.stat(stuck["pid"])) is not None and found.state == "D", "D state")
        answer = await keeper.call("end", token=1, by_ns=int(soon(0.3) * 1e9))
        assert (answer["clean"], answer["unkillable"], answer["pending"]) == (False, [stuck["pid"]], True)
        assert _text(f"{mount_point()}{stuck['cgroup']}/../cgroup.freeze") == "1\n"
        with pytest.raises(KeeperRefused) as refused:
            await keeper.arm(2)
        assert refused.value.error == "unkillable"
        assert _flock_is_busy(path)
    finally:
        await asyncio.to_thread(fsfreeze, "-u", freezable)
    await keeper.event("cleared", token=1)
    assert not _flock_is_busy(path)
    await keeper.arm(2)


def _text(path: str) -> str:
    return Path(path).read_text()


def _flock_is_busy(path: Path) -> bool:
    return subprocess.run(["flock", "-n", path, "true"], check=False).returncode == 1
