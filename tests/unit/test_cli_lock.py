"""`gpuward lock list`: what it makes of /status."""

import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from supervisor.cli.app import app
from tests.unit.config_samples import SMALL, write
from tests.unit.test_cli_status import answering

runner = CliRunner()
HELD: dict[str, Any] = {
    "role": "leader",
    "gpus": [
        {
            "index": 0,
            "lock": {
                "path": "/run/gpuward/gpu-0.lock",
                "holder": {
                    "service": "trainer",
                    "pid": 4242,
                    "since": 1796077210.926,
                    "token": 7,
                    "held_s": 7800.0,
                    "command": "python secret",
                },
                "waiting": ["high", "early", "late", "low"],
            },
        },
        {"index": 1, "lock": {"path": "/run/gpuward/gpu-1.lock", "holder": None, "waiting": []}},
    ],
}


def listed(folder: Path, answer: dict[str, Any], *options: str) -> str:
    with answering(json.dumps(answer).encode()) as url:
        path = write(folder, SMALL + f"api: {{listen: '{url.removeprefix('http://')}'}}\n")
        result = runner.invoke(app, ["lock", "list", "--config", str(path), *options])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_a_held_lock_shows_its_holder_for_how_long_and_who_waits_in_order(tmp_path: Path) -> None:
    row = next(line for line in listed(tmp_path, HELD).splitlines() if "gpu-0.lock" in line)
    for part in ("trainer", "4242", " 7 ", "2026-11-30T", "2 h 10 min", "high, early, late, low"):
        assert part in row, part


def test_a_free_lock_is_shown_as_free(tmp_path: Path) -> None:
    row = next(line for line in listed(tmp_path, HELD).splitlines() if "gpu-1.lock" in line)
    assert row.split()[:2] == ["1", "free"]


def test_json_has_one_object_for_each_gpu_and_no_command(tmp_path: Path) -> None:
    assert json.loads(listed(tmp_path, HELD, "--format", "json")) == [
        {
            "gpu": 0,
            "path": "/run/gpuward/gpu-0.lock",
            "holder": {"service": "trainer", "pid": 4242, "since": 1796077210.926, "token": 7},
            "held_s": 7800.0,
            "waiting": ["high", "early", "late", "low"],
        },
        {"gpu": 1, "path": "/run/gpuward/gpu-1.lock", "holder": None, "held_s": None, "waiting": []},
    ]


def test_an_answer_of_another_version_with_keys_missing_is_still_listed(tmp_path: Path) -> None:
    assert "free" in listed(tmp_path, {"role": "standby", "gpus": [{}], "services": [{}]})
    assert json.loads(listed(tmp_path, {"role": "standby"}, "--format", "json")) == []


def test_what_others_wrote_cannot_steer_the_terminal(tmp_path: Path) -> None:
    holder = {"service": "x\x1b[2J", "pid": 1, "since": "s\x07", "token": None}
    output = listed(tmp_path, {"role": "leader", "gpus": [{"index": 0, "lock": {"path": "p", "holder": holder}}]})
    assert not {"\x1b", "\x07"} & set(output)


def test_without_a_daemon_it_is_one_line_and_69(tmp_path: Path) -> None:
    path = write(tmp_path, SMALL + "api: {listen: '127.0.0.1:1'}\n")
    result = runner.invoke(app, ["lock", "list", "--config", str(path)])
    assert result.exit_code == 69
    assert len(result.stderr.splitlines()) == 1
