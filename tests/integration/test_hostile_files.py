"""Files of a node that somebody else replaced, damaged or shares: it starts, says so, and never breaks another node."""

import contextlib
import ctypes
import errno
import json
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from supervisor import flock, mutex
from supervisor.cgroup import mount_point
from supervisor.mutex import MutexUnsafe, create, remove_stale, take_path
from tests.bed.nodes import LONG_TTL, Make, NodeBed

SLEEPER = ("sleep", "1000")
DEEP = b"[" * 4000
KINDS = ["symbolic link", "folder", "socket", "FIFO"]


def put(kind: str, name: Path) -> None:
    """In place of what is there, in one step: a node that watches the name repairs it at once."""
    made = name.parent.parent / "made"
    if kind == "symbolic link":
        made.symlink_to("/etc/hostname")
    elif kind == "folder":
        (made / "inner").mkdir(parents=True)
    elif kind == "FIFO":
        os.mkfifo(made)
    else:
        with socket.socket(socket.AF_UNIX) as found:
            found.bind(str(made))
    if os.path.lexists(name):
        exchange(made, name)
        made.unlink()
    else:
        made.rename(name)


def exchange(one: Path, other: Path) -> None:
    """renameat2(2), RENAME_EXCHANGE: rename(2) puts no folder in the place of a file."""
    here, swap = -100, 2
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(here, bytes(one), here, bytes(other), swap):
        raise OSError(ctypes.get_errno(), f"exchange of {one} and {other}")


def strays(folder: Path) -> list[str]:
    """Names but those of a lock file and of folders that were moved aside."""
    known = {"gpu-0.lock", ".gpu-0.lock.gpuward"}
    return [path.name for path in folder.iterdir() if path.name not in known and ".replaced-" not in path.name]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    folder = tmp_path / "l"
    folder.mkdir()
    return folder / "gpu-0.lock"


# --- the lock file


@pytest.mark.parametrize("victim", ["path", "guard"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_lock_file_replaced_by_what_is_no_file_is_linked_back_and_told(path: Path, kind: str, victim: str) -> None:
    lock = create(path, token=1, node="a")
    guard = Path(flock.guard_path(str(path)))
    put(kind, path if victim == "path" else guard)
    told = str(lock.repair())
    assert f"replaced by a {kind} of uid {os.geteuid()}" in told
    assert path.lstat().st_ino == os.fstat(lock.fd).st_ino == guard.lstat().st_ino
    assert strays(path.parent) == []
    aside = [found for found in path.parent.iterdir() if ".replaced-" in found.name]
    assert [str(found) in told and (found / "inner").is_dir() for found in aside] == [True] * (kind == "folder")
    assert lock.repair() is None
    lock.remove()


@pytest.mark.parametrize("victim", ["path", "guard"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_file_in_the_place_of_a_lock_keeps_neither_take_over_nor_stand_down_out(
    path: Path, kind: str, victim: str
) -> None:
    name = path if victim == "path" else Path(flock.guard_path(str(path)))
    create(path, token=1, node="a").close()
    put(kind, name)
    lock = create(path, token=2, node="a")
    assert json.loads(path.read_text())["token"] == 2
    put(kind, name)
    lock.remove()
    create(path, token=3, node="a").close()
    put(kind, name)
    assert remove_stale(path) is True
    os.close(take_path(path))
    put(kind, name)
    os.close(take_path(path))
    put(kind, name)
    mutex.adopt(path).remove()
    assert [found.name for found in path.parent.iterdir() if ".replaced-" not in found.name] == []


def test_a_folder_in_the_place_of_a_lock_is_told_at_take_over(path: Path) -> None:
    create(path, token=1, node="a").close()
    put("folder", path)
    notes: list[str] = []
    create(path, token=2, node="a", note=notes.append).remove()
    assert ".replaced-" in notes[0]


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_never_a_lock_is_left_where_it_is(path: Path, kind: str) -> None:
    put(kind, path)
    before = path.lstat().st_ino
    for take in (take_path, lambda name: create(name, token=1, node="a")):
        with pytest.raises(OSError) as error:  # noqa: PT011 - any refusal will do
            take(path)
        assert isinstance(error.value, MutexUnsafe) or error.value.errno in (errno.EISDIR, errno.ENXIO)
    assert path.lstat().st_ino == before
    assert len(list(path.parent.iterdir())) == 1


def test_a_replacement_that_fails_leaves_nothing_temporary(path: Path) -> None:
    """A folder that is a mount point can be neither replaced nor renamed."""
    lock = create(path, token=1, node="a")
    path.unlink()
    path.mkdir()
    with mounted(path), pytest.raises(OSError, match="busy"):
        lock.repair()
    assert strays(path.parent) == []
    lock.remove()


def test_a_regular_file_in_the_place_of_a_lock_that_is_held_still_counts_as_a_holder(path: Path) -> None:
    os.close(take_path(path))
    path.unlink()
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    flock.flock_now(fd, str(path))
    with pytest.raises(flock.MutexBusy):
        take_path(path)
    os.close(fd)
    os.close(take_path(path))


@contextlib.contextmanager
def mounted(folder: Path, size: str = "64k") -> Iterator[None]:
    command = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=755", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, check=False, capture_output=True).returncode != 0:
        pytest.skip("needs the right to mount a small tmpfs")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_node_repairs_a_lock_that_became_a_folder_and_leads_again_later(make_node: Make) -> None:
    node = make_node(ttl=LONG_TTL).after_an_orderly_end()
    node.add_service("one", *SLEEPER)
    node.start().until_leading()
    lock = node.run / "gpu-0.lock"
    inode = lock.stat().st_ino
    put("folder", lock)
    node.until(lambda: lock.is_file() and lock.stat().st_ino == inode)
    told = node.until(lambda: alarms(node, "lock-file"))
    assert "replaced by a folder" in told[0]
    node.signal(signal.SIGTERM)
    assert node.exit_code() == 0
    assert not lock.exists()
    node.start().until_leading()


def test_a_node_starts_on_files_that_are_nested_too_deeply(make_node: Make) -> None:
    node = make_node(ttl=LONG_TTL).after_an_orderly_end()
    node.add_service("one", *SLEEPER)
    files = ["run/run-id", "run/parent.json", "run/stay-out.json", "run/term.json", "run/keeper.json"]
    files += ["run/gpu-0.lock", "run/services/one.json", "state/journal.json", "state/floor.json"]
    for file in files:
        (node.folder / file).parent.mkdir(parents=True, exist_ok=True)
        (node.folder / file).write_bytes(DEEP)
    (node.run / "gpu-0.lock").chmod(0o640)
    node.start().until_leading()


# --- a disk without room


def test_a_killed_node_starts_again_in_a_full_run_folder_and_says_so(make_node: Make) -> None:
    node = make_node().after_an_orderly_end()
    node.add_service("one", *SLEEPER)
    node.run.mkdir()
    with mounted(node.run):
        node.start().until_leading()
        os.kill(node.keeper(), signal.SIGKILL)
        node.kill()
        for name in ("locks.json", "run-id", "keeper.pid"):
            (node.run / name).unlink()
        fill(node.run)
        node.start()
        node.until_leading()
        told = alarms(node, "disk")
        for name in ("locks.json", "run-id"):
            assert any(f"{name} could not be written (No space left" in text for text in told), told
        node.end()


def alarms(node: NodeBed, kind: str) -> list[str]:
    return [row["text"] for row in (node.status() or {"alarms": []})["alarms"] if row["kind"] == kind]


def fill(folder: Path) -> None:
    with contextlib.suppress(OSError), (folder / "filling").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


# --- what two nodes share


@pytest.mark.parametrize("inner_first", [True, False], ids=["inner first", "outer first"])
def test_a_node_does_not_start_in_a_cgroup_around_or_inside_another_nodes(make_node: Make, inner_first: bool) -> None:
    outer, inner = make_node("n1", ttl=LONG_TTL).after_an_orderly_end(), make_node("n2", ttl=LONG_TTL)
    outer.config["cgroup"], inner.config["cgroup"] = outer.cgroup.strip("/"), f"{outer.cgroup.strip('/')}/deep/n2"
    first, second = (inner, outer) if inner_first else (outer, inner)
    first.add_service("one", *SLEEPER)
    first.start().until_leading()
    second.start()
    assert second.exit_code() == 1
    assert f"/{first.config['cgroup']}, which pid {pid_of(first)} of another node has" in second.output()
    if inner_first:
        limit = Path(f"{mount_point()}/{outer.config['cgroup']}/cgroup.max.descendants")
        assert limit.read_text() == "max\n"
    else:
        assert not Path(f"{mount_point()}/{outer.config['cgroup']}/deep").exists()
    assert first.leads()
    assert first.service_pids()


def test_a_keeper_whose_supervisor_was_killed_keeps_other_nodes_out_of_the_cgroups_around_it(make_node: Make) -> None:
    inner, outer = make_node("n2", ttl=LONG_TTL).after_an_orderly_end(), make_node("n1", ttl=LONG_TTL)
    outer.config["cgroup"], inner.config["cgroup"] = outer.cgroup.strip("/"), f"{outer.cgroup.strip('/')}/n2"
    inner.start().until_leading()
    keeper = inner.keeper()
    inner.kill()
    outer.start()
    assert outer.exit_code() == 1
    assert f"which pid {keeper} of another node has" in outer.output()


def test_a_node_whose_cgroup_moved_into_its_earlier_one_still_starts(make_node: Make) -> None:
    node = make_node(ttl=LONG_TTL).after_an_orderly_end()
    node.config["cgroup"] = node.cgroup.strip("/")
    node.start().until_leading()
    node.kill()
    node.config["cgroup"] = f"{node.cgroup.strip('/')}/n1"
    node.start()
    node.until(lambda: node.status())


def test_two_nodes_with_one_log_folder_are_refused(make_node: Make) -> None:
    first, second = make_node("n1"), make_node("n2")
    second.config["paths"]["log"] = first.config["paths"]["log"]
    first.start()
    first.until(lambda: first.status())
    second.start()
    assert second.exit_code() == 1
    assert f"the log folder {first.config['paths']['log']}" in second.output()
    assert "`paths.log`" in second.output()
    first.signal(signal.SIGTERM)
    assert first.exit_code() == 0
    second.start()
    second.until(lambda: second.status())


def pid_of(node: NodeBed) -> int:
    assert node.process is not None
    return node.process.pid
