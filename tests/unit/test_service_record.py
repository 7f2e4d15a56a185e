"""What a supervisor reads of `services/NAME.json`, when that is not what it has written."""

import json
import os
import socket
from dataclasses import asdict
from pathlib import Path

import pytest

from supervisor.service.record import Record, Records
from supervisor.service.restart import Account

NOBODY = 65534
RECORD = Record(
    token=3, spec="x", state="running", why="ready", held=True, restarts=2, executable="x", account=Account()
)


class Folder:
    """A run folder with the record of the service `one`, and what was reported of it."""

    def __init__(self, run: Path) -> None:
        self.reports: list[str] = []
        self.records = Records(run, "this boot", self.reports.append)
        self.file = run / "services" / "one.json"
        self.file.parent.mkdir()
        self.content = json.dumps({"version": 1, "boot_id": "this boot", **asdict(RECORD)})
        self.file.write_text(self.content)

    def aside(self) -> list[Path]:
        return list(self.file.parent.glob("one.json.damaged-*"))


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


def test_what_was_written_is_read(folder: Folder) -> None:
    assert folder.records.load("one") == RECORD
    assert folder.records.load("another") is None
    assert folder.reports == []


@pytest.mark.parametrize("kind", ["link", "FIFO", "folder", "socket", "stranger"])
def test_what_is_no_file_of_ours_is_set_aside_and_never_trusted(folder: Folder, tmp_path: Path, kind: str) -> None:
    """Never fatal, never followed, never waited for; what was there before is still there, under another name."""
    target = tmp_path / "target"
    if kind == "stranger":
        if os.geteuid() != 0:
            pytest.skip("needs root, to make another user's file")
        os.chown(folder.file, NOBODY, NOBODY)
    else:
        folder.file.rename(target)
    if kind == "link":
        folder.file.symlink_to(target)
    elif kind == "FIFO":
        os.mkfifo(folder.file)
    elif kind == "folder":
        folder.file.mkdir()
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(str(folder.file))
    assert folder.records.load("one") is None
    assert len(folder.reports) == len(folder.aside()) == 1
    assert str(folder.file) in folder.reports[0]
    assert folder.aside()[0].name in folder.reports[0]
    if kind != "stranger":
        assert target.read_text() == folder.content
    assert folder.records.load("one") is None
    assert len(folder.reports) == 1  # it is out of the way


def test_a_record_is_written_in_place_of_a_link_and_not_through_it(folder: Folder, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("precious")
    folder.file.unlink()
    folder.file.symlink_to(target)
    folder.records.put("one", RECORD)
    folder.records._write_waiting()
    assert target.read_text() == "precious"
    assert not folder.file.is_symlink()
    assert folder.file.stat().st_mode & 0o777 == 0o600
    assert folder.records.load("one") == RECORD


def test_a_folder_in_place_of_a_record_is_told_and_what_is_in_it_stays(folder: Folder) -> None:
    folder.file.unlink()
    (folder.file / "inner").mkdir(parents=True)
    folder.records.put("one", RECORD)
    folder.records._write_waiting()
    assert len(folder.reports) == 1
    assert "the record of one was not written" in folder.reports[0]
    assert (folder.file / "inner").is_dir()
