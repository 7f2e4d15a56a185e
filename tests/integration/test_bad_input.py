"""Services that cannot be started as they are configured: told by check-config where it can be known, `degraded` with
the reason where not, and no other service notices."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from supervisor.config.service import Service
from supervisor.service.states import State
from tests.bed.keeper import NOBODY, Bed, until
from tests.bed.services import node_on, shell, spec

SLEEP = "exec sleep 600"
AGAIN = {"backoff": (0.05, 0.05, 0.05)}


def broken(folder: Path) -> dict[str, tuple[Service, str]]:
    """One service for each way, and what its reason has to say."""
    (folder / "plain.txt").write_text("no program\n")
    (folder / "plain.txt").chmod(0o644)
    (folder / "no-format").write_bytes(b"\x01\x02\x03\x04")
    (folder / "no-format").chmod(0o755)
    (folder / "script").write_text("#!/no/such/interpreter\n")
    (folder / "script").chmod(0o755)
    file = folder / "plain.txt"
    return {
        "missing": (spec("/no/such/program", restart=AGAIN), "No such file or directory"),
        "unfound": (spec("no-such-program", restart=AGAIN), "No such file or directory"),
        "forbidden": (spec(str(file), restart=AGAIN), "Permission denied"),
        "folder": (spec("/usr", restart=AGAIN), "Permission denied"),
        "noformat": (spec(str(folder / "no-format"), restart=AGAIN), "Exec format error"),
        "interpreter": (spec(str(folder / "script"), restart=AGAIN), "No such file or directory"),
        "nocwd": (shell(SLEEP, cwd="/no/such/folder", restart=AGAIN), "cwd: No such file or directory"),
        "filecwd": (shell(SLEEP, cwd=str(file), restart=AGAIN), "cwd: Not a directory"),
        "nogpu": (shell(SLEEP, gpu=7, lock="on-demand", restart=AGAIN), "there is no GPU 7 on this node"),
        "nolock": (shell(SLEEP, gpu=7, lock="lifetime", restart=AGAIN), "there is no GPU 7 on this node"),
        "gone": (
            shell(SLEEP, restart=AGAIN).model_copy(update={"user": "gone-since-then"}),
            "user 'gone-since-then' is not known to this machine",
        ),
        "secrets": (shell(SLEEP, env_file=folder / "absent", restart=AGAIN), "No such file or directory"),
    }


async def test_each_service_that_cannot_be_started_is_degraded_with_its_reason_and_the_others_go_on(
    any_keeper: Bed, tmp_path: Path
) -> None:
    ways = broken(tmp_path)
    specs = {name: service for name, (service, _) in ways.items()}
    async with node_on(any_keeper, **specs, well=shell(SLEEP), holds=shell(SLEEP, gpu=0, lock="lifetime")) as node:
        await node.launch()
        for name, (_, reason) in ways.items():
            row = await node.state(name, State.DEGRADED, seconds=30)
            assert reason in row["why"], name
            assert (row["failures"], row["pid"]) == (5, None)
        for name in ("well", "holds"):
            row = await node.state(name, State.RUNNING)
            assert (row["failures"], row["restarts"]) == (0, 0)
        assert not any("fault while" in event for event in node.events)
        (tmp_path / "absent").write_text("")
        await node.services.reset("secrets")
        await node.state("secrets", State.RUNNING)


@pytest.mark.parametrize("kind", ["link", "FIFO", "folder", "socket", "device"])
async def test_what_is_no_file_in_place_of_a_log_fails_its_service_alone(any_keeper: Bed, kind: str) -> None:
    """And nothing is written through it."""
    log, target = any_keeper.run / "odd.log", any_keeper.run / "precious"
    target.write_text("precious")
    if kind == "link":
        log.symlink_to(target)
    elif kind == "FIFO":
        os.mkfifo(log)
    elif kind == "folder":
        log.mkdir()
    elif kind == "device":
        log.symlink_to("/dev/null") if os.geteuid() else os.mknod(log, 0o600 | 0o020000, os.makedev(1, 3))
    else:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(str(log))
    odd = shell("echo written; exec sleep 600", restart=AGAIN)
    async with node_on(any_keeper, odd=odd, well=shell(SLEEP)) as node:
        await node.launch()
        row = await node.state("odd", State.DEGRADED, seconds=30)
        assert "log: " in row["why"]
        assert (await node.state("well", State.RUNNING))["restarts"] == 0
        assert target.read_text() == "precious"
        log.rmdir() if kind == "folder" else log.unlink()
        await node.services.reset("odd")
        await node.state("odd", State.RUNNING)
        await until(lambda: log.is_file() and log.read_text() == "written\n", "its line in a file of its own")


async def test_a_strangers_file_in_place_of_a_log_keeps_its_owner_and_its_rights(keeper: Bed) -> None:
    """It is written to, never cut (test_logfile), and nobody gets more rights to it."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to make another user's file")
    log = keeper.run / "odd.log"
    log.write_text("theirs\n")
    log.chmod(0o600)
    os.chown(log, NOBODY, NOBODY)
    async with node_on(keeper, odd=shell("echo written; exec sleep 600")) as node:
        await node.launch()
        await node.state("odd", State.RUNNING)
        await until(lambda: log.read_text() == "theirs\nwritten\n", "its line")
        found = log.stat()
        assert (found.st_uid, found.st_mode & 0o777) == (NOBODY, 0o600)


def test_check_config_tells_every_mistake_at_once_with_its_place_and_starts_nothing(tmp_path: Path) -> None:
    """What can be known is an error (78) or a warning with its consequence (0), in one run."""
    good = {"command": ["sleep", "60"], "user": os.geteuid()}
    config = {
        "cluster": "c",
        "election": {"store": "local"},
        "gpu": {"driver": "simulated", "simulated": {"folder": str(tmp_path / "gpu")}},
        "services": {
            "a": {**good, "user": "no-such-user"},
            "b": {**good, "cwd": "work"},
            "c": {**good, "gpu": 3, "lock": "lifetime"},
            "d": {**good, "after": ["e"]},
            "e": {**good, "after": ["d"]},
            "f": {**good, "after": ["nobody"]},
        },
    }
    path = tmp_path / "gpuward.yml"
    text = yaml.safe_dump(config) + "  a:\n    command: [x]\n    user: root\n"  # `services` comes last: a second `a`
    path.write_text(text)
    duplicate = check(path)
    assert duplicate.returncode == 78
    assert "services.a" in duplicate.stderr
    path.write_text(yaml.safe_dump(config))
    done = check(path)
    assert done.returncode == 78
    for place in ("services.a.user", "services.b.cwd", "services.c.gpu", "services.d", "services.f"):
        assert place in done.stderr, done.stderr
    assert "d after e after d" in done.stderr or "e after d after e" in done.stderr
    assert done.stderr.count("gpuward.yml:") >= 5  # each with its line

    (tmp_path / "plain.txt").touch(0o644)
    config["services"] = {
        "missing": {**good, "command": ["/no/such/program"]},
        "forbidden": {**good, "command": [str(tmp_path / "plain.txt")]},
        "nocwd": {**good, "cwd": "/no/such/folder"},
        "first": {**good, "gpu": 0, "lock": "lifetime"},
        "second": {**good, "gpu": 0, "lock": "lifetime"},
    }
    path.write_text(yaml.safe_dump(config))
    done = check(path, "--format", "json")
    assert done.returncode == 0
    told = json.loads(done.stdout)["warnings"]
    for words in (
        ("services.missing.command", "cannot start"),
        ("services.forbidden.command", "cannot start"),
        ("services.nocwd.cwd", "cannot start"),
        ("first, second", "all but one wait for ever"),
    ):
        assert any(all(word in warning for word in words) for warning in told), (words, told)
    assert not (tmp_path / "gpu").exists()


def check(path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "supervisor.entry", "check-config", "--config", str(path), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)
