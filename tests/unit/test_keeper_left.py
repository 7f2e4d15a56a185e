"""What a keeper leaves for the next one, and that nothing damaged is believed."""

import json
from pathlib import Path
from typing import Any

import pytest

from supervisor import proc
from supervisor.keeper import left
from supervisor.keeper.left import Left, LeftLock, LeftProcess, LeftService

HOLDER = {"service": "one", "pid": 7, "since": 1.5, "token": 3}
WHOLE = Left(
    over=2,
    token=3,
    deadline_ns=99,
    services={"one": LeftService(LeftProcess(7, 70), 5, {"side-proxy": LeftProcess(8, 71, ready=True)})},
    locks={0: LeftLock("/run/gpu-0.lock", (1, 2), HOLDER, "/term-3/one", 6), 1: LeftLock("/x", (1, 3), None, None, 0)},
)


def test_what_was_written_is_read_again(tmp_path: Path) -> None:
    file = str(tmp_path / "keeper.json")
    left.write(file, WHOLE)
    assert left.read(file) == WHOLE
    assert (tmp_path / "keeper.json").stat().st_mode & 0o777 == 0o600


def test_a_missing_file_is_nothing_left(tmp_path: Path) -> None:
    assert left.read(str(tmp_path / "keeper.json")) == Left()


def test_of_another_boot_only_the_token_that_is_over_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = str(tmp_path / "keeper.json")
    left.write(file, WHOLE)
    monkeypatch.setattr(proc, "boot_id", lambda: "another")
    assert left.read(file) == Left(over=2)


def test_the_file_of_the_version_before_is_read(tmp_path: Path) -> None:
    (tmp_path / "keeper.json").write_text('{"version": 1, "over": 41}\n')
    assert left.read(str(tmp_path / "keeper.json")) == Left(over=41)


def _changed(*path: Any, to: Any) -> str:
    data = json.loads(json.dumps({"over": 2, "boot_id": proc.boot_id(), "term": {"token": 3, "deadline_ns": 99}}))
    data |= {"services": {"one": {"pid": 7, "start_ticks": 70, "since_ns": 5}}}
    data |= {"locks": {"0": {"path": "/x", "device": 1, "inode": 2, "holder": HOLDER, "box": "/b", "taken_ns": 6}}}
    place = data
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = to
    return json.dumps(data)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"over": true}',
        _changed("over", to="2"),
        _changed("term", "token", to=1.5),
        _changed("term", to=[3]),
        _changed("services", to=[1]),
        _changed("services", "one", "pid", to=None),
        _changed("services", "one", to={}),
        _changed("locks", "0", "holder", to="me"),
        _changed("locks", "0", "box", to=7),
        _changed("locks", to={"zero": {}}),
    ],
)
def test_a_damaged_file_is_set_aside_and_counts_as_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "keeper.json").write_text(text)
    assert left.read(str(tmp_path / "keeper.json")) == Left()
    assert [path.name for path in tmp_path.iterdir()] == ["keeper.json.corrupt"]
