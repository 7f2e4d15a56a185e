"""Identity of processes, and files that are whole or absent."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from supervisor import files, proc
from supervisor.cgroup import mount_point


def test_a_name_with_brackets_and_spaces_is_parsed_from_the_last_bracket() -> None:
    tail = "S 7 1 9 0 -1 4194304 0 0 0 0 0 0 0 0 20 0 1 0 4711 0"
    found = proc.parse_stat(f"12 (a) b) (c\n) {tail}\n".encode())
    assert (found.pid, found.comm, found.state, found.ppid, found.session) == (12, "a) b) (c\n", "S", 7, 9)
    assert found.start_ticks == 4711


@pytest.mark.parametrize("raw", [b"", b"12 (x", b"12 (x) S 1", b"nonsense"])
def test_what_is_no_stat_line_is_a_value_error(raw: bytes) -> None:
    with pytest.raises(ValueError, match="not a line"):
        proc.parse_stat(raw)


def test_the_identity_of_a_process_does_not_move_with_the_wall_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """psutil 2526: create_time moved with NTP, and a live process looked gone. Ticks since boot do not."""
    before = proc.identity(os.getpid())
    monkeypatch.setattr(time, "time", lambda: 0.0)
    monkeypatch.setattr(time, "monotonic", lambda: 0.0)
    assert before is not None
    assert proc.identity(os.getpid()) == before
    assert proc.is_alive(before)
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    assert before.start_ticks == int(fields[19])  # field 22 of proc_pid_stat(5)


def test_a_process_with_other_start_ticks_is_a_stranger() -> None:
    """nomad PR 24538: re-attached to a reused PID, killed a stranger."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as child:
        who = proc.identity(child.pid)
        assert who is not None
        assert proc.is_alive(who)
        assert not proc.is_alive(who._replace(start_ticks=who.start_ticks - 1))
        assert not proc.is_alive(who._replace(boot_id="another boot"))
        assert proc.open_pidfd(who.pid, who.start_ticks - 1) is None
        assert proc.kill(who.pid, who.start_ticks - 1) is False
        assert proc.kill(who.pid, who.start_ticks) is True
        assert child.wait() == -signal.SIGKILL
        assert not proc.is_alive(who)


def test_a_zombie_has_ended_and_can_do_nothing_any_more() -> None:
    with subprocess.Popen(["true"]) as child:
        who = proc.identity(child.pid)
        assert who is not None
        pidfd = os.pidfd_open(child.pid)
        try:
            os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOWAIT)
            assert not proc.is_alive(who)
            assert proc.kill_pending(child.pid)
            assert proc.pidfd_exited(pidfd)
        finally:
            os.close(pidfd)


def test_a_living_process_has_no_kill_pending() -> None:
    assert not proc.kill_pending(os.getpid())
    assert proc.pidfd_pid(os.pidfd_open(os.getpid())) == os.getpid()


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    files.write_atomically(path, b"old")
    files.write_atomically(path, b"new", 0o644)
    assert path.read_bytes() == b"new"
    assert path.stat().st_mode & 0o777 == 0o644
    path.unlink()
    path.mkdir()
    with pytest.raises(IsADirectoryError):
        files.write_atomically(path, b"x")
    assert os.listdir(tmp_path) == ["state.json"]


def test_links_are_not_followed_and_folders_are_checked(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/etc/hostname")
    with pytest.raises(OSError, match="symbolic"):
        files.open_owned(tmp_path / "link")
    with pytest.raises(files.UnsafeFileError):
        files.open_owned("/dev/null")
    tmp_path.chmod(0o770)
    with pytest.raises(files.UnsafeFileError, match="0770"):
        files.check_folder(str(tmp_path))


def test_the_cgroup2_mount_is_found_where_there_is_one() -> None:
    mount = mount_point()
    if mount is None:
        pytest.skip("needs a cgroup2 mount")
    assert Path(mount, "cgroup.procs").exists()
