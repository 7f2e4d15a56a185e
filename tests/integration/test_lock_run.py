"""The command `gpuward lock run` without a daemon: exit codes, messages, and what the command gets."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from supervisor.cli import lock_run
from tests.bed.keeper import wait_for

_ROOT = Path(__file__).parents[2]
_LOCK_RUN = [sys.executable, "-m", "supervisor.entry", "lock", "run"]


def _lock_run(*argv: str | Path) -> subprocess.CompletedProcess[str]:
    command = [*_LOCK_RUN, *map(str, argv)]
    return subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False, timeout=20)


def test_the_command_gets_the_flocked_file_and_its_exit_code_comes_through(tmp_path: Path) -> None:
    file = tmp_path / "f"
    done = _lock_run("--path", file, "--", "sh", "-c", "cat /proc/self/fdinfo/* 2>/dev/null | grep -c FLOCK; exit 9")
    assert (done.returncode, done.stdout) == (9, "1\n")
    assert done.stderr.count("\n") == 1
    assert "not fenced" in done.stderr
    assert file.stat().st_mode & 0o777 == 0o640


def test_busy_is_exit_75_with_one_json_line_that_names_the_holder(tmp_path: Path) -> None:
    file = tmp_path / "f"
    with subprocess.Popen([*_LOCK_RUN, "--path", file, "--", "cat"], cwd=_ROOT, stdin=-1, stderr=-1) as holder:
        assert holder.stderr is not None
        holder.stderr.readline()
        wait_for(lambda: Path(f"/proc/{holder.pid}/comm").read_text() == "cat\n", "the exec")
        done = _lock_run("--path", file, "--", "true")
        assert done.returncode == 75
        said = json.loads(done.stderr)
        assert said["reason"] == "busy"
        assert (said["holder"]["pid"], said["holder"]["command"]) == (holder.pid, "cat")
        holder.communicate()
    assert _lock_run("--path", file, "--", "true").returncode == 0


def test_a_signal_to_the_holder_ends_it_and_frees_the_lock(tmp_path: Path) -> None:
    """watt-mind/factory 2098: SIGTERM hit the `flock` wrapper, the daemon kept the lock."""
    file = tmp_path / "f"
    with subprocess.Popen([*_LOCK_RUN, "--path", file, "--", "cat"], cwd=_ROOT, stdin=-1, stderr=-1) as holder:
        assert holder.stderr is not None
        holder.stderr.readline()
        holder.terminate()
        assert holder.wait() == -signal.SIGTERM
    assert _lock_run("--path", file, "--", "true").returncode == 0


def test_the_lock_outlives_the_command_in_its_child(tmp_path: Path) -> None:
    """airlift PR 834: the fd is inherited on purpose."""
    file, pid = tmp_path / "f", tmp_path / "pid"
    script = f"(setsid sh -c 'echo $$ > {pid}; exec sleep 60' > /dev/null 2>&1 &)"
    assert _lock_run("--path", file, "--", "sh", "-c", script).returncode == 0
    wait_for(lambda: pid.exists() and pid.read_text() != "", "the child")
    assert _lock_run("--path", file, "--", "true").returncode == 75
    os.kill(int(pid.read_text()), signal.SIGKILL)
    wait_for(lambda: _lock_run("--path", file, "--", "true").returncode == 0, "the lock")


def test_no_daemon_means_no_authority(tmp_path: Path) -> None:
    done = _lock_run("--run-dir", tmp_path, "--", "true")
    assert done.returncode == 75
    said = json.loads(done.stderr)
    assert (said["reason"], said["holder"], said["gpu"]) == ("no-authority", None, 0)
    assert said["message"].endswith("name its run folder with --run-dir (no configuration is read here)")


def test_commands_that_cannot_run_give_what_a_shell_gives(tmp_path: Path) -> None:
    assert _lock_run("--path", tmp_path / "f", "--", "no-such-command").returncode == 127
    assert _lock_run("--path", tmp_path / "f", "--", "/etc/passwd").returncode == 126
    assert _lock_run("--path", tmp_path / "f", "--", "true").returncode == 0


@pytest.mark.parametrize(
    "argv",
    [
        ["--gpu"],
        ["--gpu", "x", "--", "true"],
        ["--gpu", "0"],
        ["--gpu", "0", "--path", "f", "--", "true"],
        ["--nope"],
        [],
    ],
)
def test_wrong_usage_is_exit_64_and_shows_the_usage(argv: list[str]) -> None:
    done = _lock_run(*argv)
    assert done.returncode == 64
    assert "usage: gpuward lock run" in done.stderr


def test_a_configuration_is_answered_with_the_option_that_there_is() -> None:
    done = _lock_run("--config", "/etc/gpuward/gpuward.yml", "--", "true")
    assert (done.returncode, "name the run folder with --run-dir" in done.stderr) == (64, True)


def test_help_is_no_error() -> None:
    done = _lock_run("--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: gpuward lock run")


def test_a_lock_file_that_cannot_be_made_is_exit_73(tmp_path: Path) -> None:
    done = _lock_run("--path", tmp_path / "no" / "f", "--", "true")
    assert done.returncode == 73
    assert "No such file" in done.stderr


def test_lock_run_does_not_load_the_rest_of_the_command_line(tmp_path: Path) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "supervisor.entry", "lock", "run"]
    done = subprocess.run(
        [*command, "--path", tmp_path / "f", "--", "true"], cwd=_ROOT, capture_output=True, text=True, check=True
    )
    loaded = {line.rsplit("|", 1)[1].strip() for line in done.stderr.splitlines() if "|" in line}
    assert loaded & {"typer", "pydantic", "asyncio", "json", "socket", "ctypes", "subprocess"} == set()


def test_the_json_line_is_json_whatever_the_names_contain() -> None:
    value = {"reason": "busy", "holder": {"pid": 7, "service": None, "command": 'a"b\\c\n\t€😀\udcff'}, "path": "/x"}
    assert json.loads(lock_run._json(value)) == value
