"""The lock file itself: made, taken, repaired, removed; and what it refuses to be."""

import errno
import fcntl
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from supervisor import flock, mutex, proc
from supervisor.mutex import LockFile, MutexBusy, MutexLost, MutexUnsafe, create, gpu_lock, holders, take_path
from tests.bed.keeper import NOBODY, wait_for


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "gpu-0.lock"


@pytest.fixture
def holder(path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A foreign process that has the flock, by flock(1)."""
    with subprocess.Popen(["flock", "-n", path, "sh", "-c", "echo; exec cat"], stdin=-1, stdout=-1) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.communicate()


def test_a_lock_file_says_whose_it_is(path: Path) -> None:
    lock = create(path, token=41, node="a")
    found = json.loads(path.read_text())
    assert (found["token"], found["node"], found["owner"]["pid"]) == (41, "a", os.getpid())
    assert path.stat().st_mode & 0o777 == 0o640
    lock.remove()
    assert list(path.parent.iterdir()) == []


def test_a_stale_file_is_rewritten_in_place_and_told(path: Path) -> None:
    dead = proc.Identity(proc.boot_id(), 2**22 - 1, 1)._asdict()
    path.write_text(json.dumps({"token": 40, "node": "b", "owner": dead}) + " " * 500)
    before = path.stat().st_ino
    notes: list[str] = []
    lock = create(path, token=41, node="a", note=notes.append)
    assert path.stat().st_ino == before
    assert json.loads(path.read_text())["token"] == 41
    assert len(notes) == 1
    assert "token 40" in notes[0]
    lock.remove()


def test_a_file_of_a_living_supervisor_is_left_alone(path: Path) -> None:
    with subprocess.Popen(["cat"], stdin=-1) as other:
        who = proc.identity(other.pid)
        assert who is not None
        path.write_text(json.dumps({"token": 40, "node": "b", "owner": who._asdict()}))
        with pytest.raises(MutexUnsafe, match=f"living supervisor, pid {other.pid}"):
            create(path, token=41, node="a")
        other.communicate()


def test_a_held_file_is_not_claimed_and_its_true_holders_are_named(path: Path, holder: subprocess.Popen[bytes]) -> None:
    with path.open(), pytest.raises(MutexBusy) as busy:  # an open file is only a reader
        create(path, token=1, node="a")
    assert {who.command for who in busy.value.holders} == {"flock", "cat"}


def test_a_held_file_is_not_removed(path: Path) -> None:
    lock = create(path, token=1, node="a")
    fd = take_path(path)
    with pytest.raises(MutexBusy):
        lock.remove()
    assert path.exists()
    os.close(fd)
    assert mutex.remove_stale(path) is True
    assert mutex.remove_stale(path) is False
    assert list(path.parent.iterdir()) == []


@pytest.mark.parametrize("victim", ["path", "guard"])
@pytest.mark.parametrize("how", ["deleted", "replaced"])
def test_either_link_is_repaired(path: Path, victim: str, how: str) -> None:
    lock = create(path, token=1, node="a")
    name = path if victim == "path" else Path(flock.guard_path(str(path)))
    name.unlink()
    if how == "replaced":
        name.touch()
    assert how in str(lock.repair())
    assert path.stat().st_ino == os.fstat(lock.fd).st_ino == Path(flock.guard_path(str(path))).stat().st_ino
    assert lock.repair() is None
    lock.remove()


def test_both_links_deleted_is_said_and_nothing_new_is_made(path: Path) -> None:
    lock = create(path, token=1, node="a")
    path.unlink()
    Path(flock.guard_path(str(path))).unlink()
    with pytest.raises(MutexLost):
        lock.repair()
    assert list(path.parent.iterdir()) == []
    lock.close()


def test_a_file_deleted_while_held_by_path_does_not_give_a_second_holder(path: Path) -> None:
    fd = take_path(path)
    path.unlink()
    with pytest.raises(MutexBusy):
        take_path(path)
    os.close(fd)
    again = take_path(path)
    assert path.stat().st_ino == os.fstat(again).st_ino
    os.close(again)


def test_a_file_replaced_while_held_by_path_does_not_give_a_second_holder(path: Path) -> None:
    fd = take_path(path)
    inode = os.fstat(fd).st_ino
    path.unlink()
    path.touch()
    with pytest.raises(MutexBusy):
        take_path(path)
    os.close(fd)
    again = take_path(path)
    assert path.stat().st_ino == inode
    os.close(again)


def test_who_holds_a_replacement_by_another_tool_counts_as_a_holder(path: Path) -> None:
    os.close(take_path(path))
    path.unlink()
    with subprocess.Popen(["flock", "-n", path, "sh", "-c", "echo; exec cat"], stdin=-1, stdout=-1) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(MutexBusy):
            take_path(path)
        other.communicate()
    os.close(take_path(path))


def test_the_lock_lives_as_long_as_any_process_that_inherited_it(path: Path) -> None:
    fd = take_path(path)
    os.set_inheritable(fd, True)
    with subprocess.Popen(["cat"], stdin=-1, pass_fds=[fd]) as child:
        os.close(fd)
        with pytest.raises(MutexBusy) as busy:
            take_path(path)
        assert [who.pid for who in busy.value.holders if who.pid != os.getpid()] in ([], [child.pid])
        assert [who.pid for who in holders(os.open(path, os.O_RDONLY))] == [child.pid]
        child.communicate()
    os.close(take_path(path))


def test_links_folders_and_fifos_are_no_lock_files(path: Path) -> None:
    target = path.with_name("target")
    target.touch()
    path.symlink_to(target)
    with pytest.raises(MutexUnsafe, match="symbolic link"):
        take_path(path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(MutexUnsafe, match="regular"):
        take_path(path)
    path.unlink()
    path.mkdir()
    with pytest.raises(OSError) as error:  # noqa: PT011 - the number is what is looked at
        take_path(path)
    assert error.value.errno == errno.EISDIR


def test_a_folder_that_others_may_write_to_holds_no_gpu_lock(path: Path) -> None:
    path.parent.chmod(0o777)
    with pytest.raises(MutexUnsafe, match="lets group or others write"):
        create(path, token=1, node="a")


def test_a_strangers_file_in_a_public_folder_is_refused(path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to make another user's file")
    path.parent.chmod(0o777)
    path.touch()
    os.chown(path, NOBODY, NOBODY)
    with pytest.raises(MutexUnsafe, match=f"uid {NOBODY}"):
        take_path(path)


@pytest.mark.parametrize("kind", ["nfs4", "cifs", "fuse.sshfs", "9p"])
def test_file_systems_without_reliable_flock_are_refused(
    path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """claude-swap 372: 94 % violations on NFS. None of them can be mounted here: what the kernel says is replaced."""
    monkeypatch.setattr(flock, "file_system", lambda fd: kind)
    with pytest.raises(MutexUnsafe, match="flock is not reliable"):
        take_path(path)


def test_the_file_system_is_what_mountinfo_says() -> None:
    with Path("/proc/self/stat").open() as file, tempfile.TemporaryFile(dir="/dev/shm") as memory:
        assert flock.file_system(file.fileno()) == "proc"
        assert flock.file_system(memory.fileno()) == "tmpfs"


def test_gpu_lock_by_path_excludes_others_inside_the_block_only(path: Path) -> None:
    with gpu_lock(path=path):
        with pytest.raises(mutex.GpuBusy) as busy, gpu_lock(path=path):
            pass
        assert busy.value.holder is not None
    with gpu_lock(path=path):
        pass


def test_without_a_keeper_gpu_lock_says_so(tmp_path: Path) -> None:
    with pytest.raises(mutex.NoAuthority, match="no keeper answers"), gpu_lock(0, run=str(tmp_path)):
        pass


def test_a_reader_of_the_group_can_take_it_too(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to become another user")
    with tempfile.TemporaryDirectory(prefix="gpuward-test-") as name:
        Path(name).chmod(0o755)
        path = Path(name) / "gpu.lock"
        lock = create(path, token=1, node="a", gid=NOBODY)
        script = f"import sys; sys.path.append({str(Path(__file__).parents[2])!r}); from supervisor import flock; "
        script += f"flock.take_path({str(path)!r}); print('taken')"
        done = subprocess.run(
            ["/usr/bin/python3", "-I", "-c", script],
            user=NOBODY,
            group=NOBODY,
            extra_groups=[],
            capture_output=True,
            check=False,
        )
        assert done.stdout == b"taken\n", done.stderr
        lock.remove()


def test_a_forked_child_that_leaves_does_not_free_its_parents_lock(path: Path) -> None:
    """filelock 634: a forked child's LOCK_UN freed the parent's lock."""
    fd = take_path(path)
    pid = os.fork()
    if pid == 0:
        os.close(fd)
        os._exit(0)
    os.waitpid(pid, 0)
    other = os.open(path, os.O_RDWR)
    with pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(other)
    os.close(fd)


def test_a_lock_file_object_reports_a_vanished_holder(path: Path) -> None:
    """The flock goes with the last process, however it ended: no stale lock can stay."""
    code = f"import time; from supervisor.flock import take_path; take_path({str(path)!r}); print(flush=True); "
    code += "time.sleep(9)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=-1, cwd=Path(__file__).parents[2]) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.kill()
    wait_for(lambda: _free(path), "the lock to be free")
    assert isinstance(LockFile(path, os.open(path, os.O_RDONLY)).repair(), type(None))


def _free(path: Path) -> bool:
    try:
        os.close(take_path(path))
    except MutexBusy:
        time.sleep(0.001)
        return False
    return True


def test_the_idle_lock_file_of_another_living_supervisor_is_no_stale_one(path: Path) -> None:
    """Two nodes that name one lock file: the end of one must not take the other's away."""
    create(path, token=1, node="a").close()
    with subprocess.Popen(["sleep", "1000"]) as other:
        try:
            owner = proc.identity(other.pid)
            assert owner is not None
            path.write_text(json.dumps({"token": 1, "node": "b", "owner": owner._asdict()}))
            with pytest.raises(mutex.MutexUnsafe, match="kept by a living supervisor"):
                mutex.remove_stale(path)
            assert path.exists()
        finally:
            other.kill()
    assert mutex.remove_stale(path) is True
