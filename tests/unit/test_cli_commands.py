import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from supervisor.cli.app import app
from tests.unit.config_samples import SMALL, write

runner = CliRunner()


def test_help_names_every_command_and_lock_run() -> None:
    shown = runner.invoke(app, ["--help"]).output
    for command in ("run", "check-config", "status", "lock", "demo", "version"):
        assert command in shown
    assert "busy" in runner.invoke(app, ["lock", "--help"]).output


def test_help_imports_nothing_that_is_slow() -> None:
    code = "import sys, supervisor.cli.app; print([m for m in ('yaml', 'pydantic', 'aiohttp') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_reading_the_configuration_imports_nothing_that_only_a_running_supervisor_needs() -> None:
    heavy = ("ssl", "structlog", "rich", "aiohttp")
    code = f"import sys, supervisor.config.loading; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("words", [["--version"], ["version"]])
def test_the_version_is_a_command_and_an_option(words: list[str]) -> None:
    done = runner.invoke(app, words)
    assert (done.exit_code, done.stdout.startswith("gpuward 0.")) == (0, True)


@pytest.mark.parametrize("command", ["run", "check-config"])
def test_a_wrong_configuration_shows_every_problem_and_exits_78(tmp_path: Path, command: str) -> None:
    path = write(tmp_path, SMALL.replace("prod", "PROD").replace("gpu1", "GPU1"))
    result = runner.invoke(app, [command, "--config", str(path)])
    assert result.exit_code == 78
    assert result.stdout == ""
    assert [line.split(": ")[1] for line in result.stderr.splitlines()] == ["cluster", "node"]
    assert result.stderr.startswith(f"{path}:1: cluster: found 'PROD', expected ")


ASKS = [["status"], ["lock", "list"], ["service", "list"], ["service", "restart", "trainer"]]


@pytest.mark.parametrize("words", ASKS, ids=" ".join)
def test_who_only_asks_the_daemon_is_told_of_wrong_paths_and_of_nothing_else(tmp_path: Path, words: list[str]) -> None:
    others = SMALL.replace("prod", "PROD").replace("user: ", "user: nobody-here-")
    here = f"{others}api: {{listen: '127.0.0.1:1'}}\npaths: {{run: {tmp_path}}}\n"
    done = runner.invoke(app, [*words, "--config", str(write(tmp_path, here))])
    assert (done.exit_code, "no daemon answers" in done.stderr) == (69, True)
    wrong = f"{others}paths: {{run: relative}}\napi: {{lisen: x}}\n"
    done = runner.invoke(app, [*words, "--config", str(write(tmp_path, wrong))])
    assert done.exit_code == 78
    assert [line.split(": ")[1] for line in done.stderr.splitlines()] == ["paths.run", "api.lisen"]


def test_a_configuration_that_is_not_there_is_answered_with_what_to_name_instead(tmp_path: Path) -> None:
    absent = ["--config", str(tmp_path / "none.yml")]
    run = runner.invoke(app, ["run", *absent])
    assert (run.exit_code, "name another with --config; " in run.stderr) == (78, True)
    assert "examples/gpuward.yml explains every key" in run.stderr
    asks = runner.invoke(app, ["status", *absent])
    assert (asks.exit_code, "or the run folder with --run-dir" in asks.stderr) == (78, True)


def test_status_asks_one_daemon_only() -> None:
    done = runner.invoke(app, ["status", "--url", "http://127.0.0.1:1", "--run-dir", "/nowhere"])
    assert (done.exit_code, "exclude each other" in done.stderr) == (2, True)


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_a_log_that_is_no_terminal_is_json_in_what_its_encoding_can_say(encoding: str) -> None:
    code = "import structlog, supervisor.log; supervisor.log.log_to_stderr(); structlog.get_logger().info('a → é 😀')"
    environment = os.environ | {"PYTHONIOENCODING": encoding, "PYTHONUTF8": "0"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment, check=True)
    line = done.stderr.decode(encoding)
    assert json.loads(line)["event"] == "a → é 😀"
    assert ("→" in line) == (encoding == "utf-8")


def test_the_environment_names_the_configuration_and_the_option_wins(tmp_path: Path) -> None:
    write(tmp_path, SMALL)
    bad = write(tmp_path, SMALL.replace("prod", "PROD"), "bad.yml")
    environment = {"GPUWARD_CONFIG": str(bad)}
    assert runner.invoke(app, ["check-config"], env=environment).stderr.startswith(f"{bad}:1: cluster: ")
    good = ["check-config", "--config", str(tmp_path / "gpuward.yml")]
    assert runner.invoke(app, good, env=environment).exit_code == 0


def test_check_config_shows_times_services_and_warnings(tmp_path: Path) -> None:
    path = write(tmp_path, SMALL.replace("[sleep, 60]", "[no-such-program]"))
    result = runner.invoke(app, ["check-config", "--config", str(path)])
    assert result.exit_code == 0
    shown = [line.split() for line in result.stdout.splitlines()]
    assert [line[0] for line in shown if line and line[0].isdecimal()] == ["60", "75", "80", "85", "90"]
    assert "which must not exceed TTL 90" in result.stdout
    assert "warning: services.trainer.command: 'no-such-program'" in result.stdout
    assert any(line[:1] == ["trainer"] and "lifetime" in line for line in shown)


def test_check_config_speaks_json(tmp_path: Path) -> None:
    good = runner.invoke(app, ["check-config", "--format", "json", "--config", str(write(tmp_path, SMALL))])
    answer = json.loads(good.stdout)
    assert answer["ok"] is True
    assert answer["timing"]["give_up"] == 75
    assert answer["services"]["trainer"]["lock"] == "lifetime"
    bad = runner.invoke(app, ["check-config", "--format", "json", "--config", str(write(tmp_path, "a: 1\n"))])
    assert bad.exit_code == 78
    assert {problem["path"] for problem in json.loads(bad.stdout)["problems"]} == {"a", "cluster", "election", "gpu"}


def test_a_demo_time_that_is_none_is_refused() -> None:
    result = runner.invoke(app, ["demo", "--for", "soon"])
    assert result.exit_code == 2
    assert "'soon'" in result.stderr
