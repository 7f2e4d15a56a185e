"""JSON from files that is nested as deeply as nobody writes it: it counts as damaged, wherever it is read."""

import json
from pathlib import Path

import pytest

from election.memory import Remembered
from supervisor import mutex
from supervisor.files import parse_json
from supervisor.keeper import left
from supervisor.keeper.left import Left
from supervisor.keeper.locks import Lock
from supervisor.memory import FileMemory
from supervisor.service.record import FOLDER, Records

DEEPER = [4000, 100_000]


@pytest.fixture(params=DEEPER)
def deep(request: pytest.FixtureRequest) -> bytes:
    return b"[" * int(request.param)


def test_json_is_parsed() -> None:
    assert parse_json(b'{"a": [1]}') == {"a": [1]}


@pytest.mark.parametrize("raw", [b"", b"\xff\xfe\0", b'{"a": 1' + b"0" * 5000 + b"}", b'{"a"', b'{"a":' * 4000])
def test_what_is_no_json_is_a_value_error(raw: bytes) -> None:
    with pytest.raises(ValueError, match=r".+"):
        parse_json(raw)


def test_deep_nesting_is_a_value_error(deep: bytes) -> None:
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_json(deep)


def test_a_deep_keeper_file_is_set_aside(tmp_path: Path, deep: bytes) -> None:
    (tmp_path / "keeper.json").write_bytes(deep)
    assert left.read(str(tmp_path / "keeper.json")) == Left()
    assert (tmp_path / "keeper.json.corrupt").exists()


def test_a_deep_lock_file_is_reclaimed_and_adopted(tmp_path: Path, deep: bytes) -> None:
    path = tmp_path / "gpu-0.lock"
    path.write_bytes(deep)
    notes: list[str] = []
    lock = mutex.create(path, token=1, node="a", note=notes.append)
    assert "without a readable description" in notes[0]
    path.write_bytes(deep)
    mutex.adopt(path).close()
    kept = Lock(0, str(path), lock.fd)
    kept.describe()
    assert json.loads(path.read_bytes()) == {"holder": None}
    lock.remove()


def test_a_description_that_can_be_read_but_hardly_written_harms_nobody(tmp_path: Path) -> None:
    """The parser and the writer have not the same limit: every depth around both."""
    path = tmp_path / "gpu-0.lock"
    lock = mutex.create(path, token=1, node="a")
    for depth in range(300, 1100):
        path.write_bytes(b'{"a": ' + b"[" * depth + b"]" * depth + b"}")
        mutex.adopt(path).close()
        Lock(0, str(path), lock.fd).describe()
    lock.remove()


def test_a_deep_record_of_a_service_is_set_aside_and_told(tmp_path: Path, deep: bytes) -> None:
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / "one.json").write_bytes(deep)
    told: list[str] = []
    assert Records(tmp_path, "boot", told.append).load("one") is None
    assert "set aside" in told[0]


async def test_a_deep_memory_of_terms_is_set_aside_and_told(tmp_path: Path, deep: bytes) -> None:
    files = ["journal.json", "floor.json", "term.json"]
    for name in files:
        (tmp_path / name).write_bytes(deep)
    told: list[str] = []
    assert await FileMemory(tmp_path, tmp_path, "boot", "home", 6, told.append).load() == Remembered((), 0, None)
    assert len(told) == len(files)
