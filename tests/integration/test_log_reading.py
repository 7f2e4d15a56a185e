"""Reading a log over its rotations, in each way that a head is cut off: no line is missing, half, or there twice."""

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from election.clock import boot_time
from supervisor.api import logs
from supervisor.api.logs import MOST_BYTES, Piece, Place, last_lines, lines_after
from supervisor.service.logfile import ALIGN, Cut, at_rest, rotate
from tests.bed.keeper import NOBODY, PATIENCE, soon
from tests.bed.nodes import LONG_TTL, Make
from tests.integration.test_logfile import dies_before_step, rules, whole

WAYS = [("/var/tmp", Cut.COLLAPSE), ("/dev/shm", Cut.PUNCH), ("/var/tmp", Cut.TRUNCATE), ("/dev/shm", Cut.TRUNCATE)]
HEAD = 3 * ALIGN
WRITER = """
import os, sys
for number in range(int(sys.argv[1])):
    os.write(1, b"%d " % number + b"." * (number % 150) + b"\\n")
    if number % 50 == 0:
        sys.stdin.buffer.read(1)
"""
"""As many lines as told; at each fiftieth it waits for a byte."""
SLOWLY = """
import sys, time
for piece in iter(lambda: sys.stdin.buffer.read(10000), b""):
    sys.stdout.buffer.write(piece)
    sys.stdout.buffer.flush()
    time.sleep(0.02)
"""
"""As a service would: 500 kB/s."""


@pytest.fixture(params=WAYS, ids=lambda way: f"{way[1]}-on-{way[0][1:].replace('/', '-')}")
def way(request: pytest.FixtureRequest) -> tuple[str, Cut]:
    found: tuple[str, Cut] = request.param
    return found


@pytest.fixture
def cuts(way: tuple[str, Cut]) -> tuple[Cut, ...]:
    return (way[1],)


@pytest.fixture
def path(way: tuple[str, Cut]) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="gpuward-test-", dir=way[0]) as folder:
        yield Path(folder) / "svc.log"


class Lines:
    """A service that writes numbered lines of one size."""

    def __init__(self, path: Path, size: int = 40) -> None:
        self.path = path
        self.size = size
        self.count = 0

    def write(self, least: int) -> None:
        """At least so many bytes; the last line is whole."""
        count = least // self.size + 1
        with self.path.open("ab", buffering=0) as file:
            file.write(b"".join(self.line(self.count + number).encode() + b"\n" for number in range(count)))
        self.count += count

    def line(self, number: int) -> str:
        return f"{number:08d} ".ljust(self.size - 1, ".")

    def last(self, count: int) -> list[str]:
        return [self.line(number) for number in range(max(0, self.count - count), self.count)]


def cut(path: Path, cuts: tuple[Cut, ...], **fields: int) -> Cut | None:
    return rotate(path, rules(**fields), deadline=soon(), cuts=cuts)


def follow(path: Path, piece: Piece) -> Piece:
    """As one who got the place as text."""
    return lines_after(path, Place.parse(str(piece.place)))


def test_a_follower_gets_each_line_once_and_in_order_while_a_fast_writer_is_rotated(
    path: Path, cuts: tuple[Cut, ...]
) -> None:
    """What truncation loses is in no file; all that is in one is shown."""
    total = 60_000
    done, rotations = threading.Event(), 0
    path.touch()

    def keep_cutting() -> None:
        nonlocal rotations
        while not done.wait(0.001):
            rotations += cut(path, cuts, keep=100) is not None

    cutter = threading.Thread(target=keep_cutting)
    words = [sys.executable, "-c", WRITER, str(total)]
    with path.open("ab") as output, subprocess.Popen(words, stdin=subprocess.PIPE, stdout=output) as writer:
        assert writer.stdin is not None
        end = soon()
        while not (piece := last_lines(path, 512)).lines and boot_time() < end:
            done.wait(0.001)
        seen, began = list(piece.lines), boot_time()
        cutter.start()
        try:
            for number in range(total // 50 + 1):
                if number < total // 50:
                    writer.stdin.write(b"x")
                    writer.stdin.flush()
                else:
                    assert writer.wait(PATIENCE) == 0
                piece = follow(path, piece)
                assert not piece.cut
                seen += piece.lines
        finally:
            done.set()
            cutter.join()
    took = boot_time() - began
    print(f"{rotations} rotations, {took:.2f} s, {total * 81 / took / 1e3:.0f} kB/s")
    assert rotations >= 5
    assert seen == whole(path).decode().splitlines()
    if cuts != (Cut.TRUNCATE,):
        assert seen == [f"{number} " + "." * (number % 150) for number in range(total)]


def test_what_is_written_while_an_empty_log_is_looked_at_is_no_hole(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path.touch()
    place = Place(path.stat().st_ino, 0, 0, 0)
    seek = os.lseek

    def write_after_the_look(fd: int, offset: int, whence: int) -> int:
        try:
            return seek(fd, offset, whence)
        finally:
            with path.open("a") as file:
                file.write("a line\n")

    with monkeypatch.context() as patch:
        patch.setattr(os, "lseek", write_after_the_look)
        piece = lines_after(path, place)
    assert (piece.lines, piece.cut) == (["a line"], False)
    piece = follow(path, piece)
    assert (piece.lines, piece.cut) == ([], False)


@pytest.mark.parametrize("size", [40, 900, 9000])
def test_the_last_lines_are_whole_and_in_order_right_after_any_rotation(
    path: Path, cuts: tuple[Cut, ...], size: int
) -> None:
    service = Lines(path, size)
    for turn in range(4):
        service.write(HEAD + turn * 1000)
        assert cut(path, cuts) is cuts[0]
        count = min(512, MOST_BYTES // size)
        piece = last_lines(path, count)
        assert piece.lines == service.last(count)
        assert (piece.unfinished, piece.cut) == ("", False)
    service.write(size)
    assert last_lines(path, 3).lines == service.last(3)


def test_a_line_that_is_unfinished_at_a_rotation_is_shown_once_and_whole(path: Path, cuts: tuple[Cut, ...]) -> None:
    service = Lines(path)
    service.write(100)
    with path.open("ab", buffering=0) as file:
        file.write(b"begun " + b"-" * HEAD)
        before = last_lines(path, 1)
        cut(path, cuts)
        after = last_lines(path, 2)
        assert len(before.unfinished) == len(after.unfinished) == HEAD + 6
        assert after.lines == service.last(1)
        file.write(b" done\nnext\n")
        for piece in (before, after):
            found = follow(path, piece)
            assert found.lines == ["begun " + "-" * HEAD + " done", "next"]
            assert not found.cut


def test_a_place_outlasts_rotations_as_long_as_its_copy_does_and_then_it_is_told(
    path: Path, cuts: tuple[Cut, ...]
) -> None:
    service = Lines(path)
    service.write(HEAD)
    places = []
    for _ in range(4):
        places.append((service.count, last_lines(path, 1)))
        service.write(HEAD)
        cut(path, cuts, keep=3)
    for count, piece in places[2:]:
        found = follow(path, piece)
        assert found.lines == service.last(service.count - count)
        assert not found.cut
    found = follow(path, places[0][1])  # its copy, the first one, is gone
    assert found.cut
    assert found.lines == service.last(len(found.lines))
    assert len(found.lines) > 2 * HEAD // service.size


def test_after_a_copy_was_deleted_it_is_told_and_no_line_comes_twice_or_half(path: Path, cuts: tuple[Cut, ...]) -> None:
    service = Lines(path)
    service.write(HEAD)
    place = last_lines(path, 1)
    service.write(HEAD)
    cut(path, cuts)
    path.with_name("svc.log.1").unlink()
    found = follow(path, place)
    assert found.cut
    assert found.lines == service.last(len(found.lines))
    again = follow(path, found)
    assert (again.lines, again.cut) == ([], False)


@pytest.mark.parametrize("what", ["link", "fifo", "folder", "stranger", "nothing"])
def test_of_a_copy_that_is_no_file_of_ours_nothing_is_read_and_it_is_told(
    path: Path, cuts: tuple[Cut, ...], what: str
) -> None:
    service = Lines(path)
    service.write(HEAD)
    place = last_lines(path, 1)
    for _ in range(2):
        service.write(HEAD)
        cut(path, cuts)
    copy, secret = path.with_name("svc.log.1"), path.with_name("secret")
    secret.write_bytes(copy.read_bytes())
    copy.unlink()
    if what == "link":
        copy.symlink_to(secret)
    elif what == "fifo":
        os.mkfifo(copy)
    elif what == "folder":
        copy.mkdir()
    elif what == "stranger":
        if os.geteuid() != 0:
            pytest.skip("needs root, to make another user's file")
        copy.write_bytes(secret.read_bytes())
        os.chown(copy, NOBODY, NOBODY)
    for piece in (follow(path, place), last_lines(path, 512 if what == "nothing" else 5000)):
        assert piece.cut
        assert piece.lines == service.last(len(piece.lines))
        assert len(piece.lines) <= ALIGN // service.size + 1


def test_killed_before_any_step_of_a_rotation_reading_goes_on_where_it_was(path: Path, cuts: tuple[Cut, ...]) -> None:
    number, killed = 0, True
    while killed:
        number += 1
        for old in path.parent.iterdir():
            old.unlink()
        service = Lines(path)
        for _ in range(3):
            service.write(HEAD)
            cut(path, cuts)
        service.write(HEAD - 200)
        place, count = last_lines(path, 1), service.count
        service.write(200)
        killed = dies_before_step(number, path, cuts)
        for finish in (False, True):
            if finish:
                cut(path, cuts, keep=4)
            service.write(500)
            context = f"killed before step {number}, finished: {finish}"
            assert last_lines(path, 5000).lines == service.last(5000), context
            found = follow(path, place)
            assert found.lines == service.last(service.count - count), context
            assert not found.cut, context
            place, count = found, service.count
    assert number > 12


def test_a_place_that_is_forged_huge_or_of_another_log_gives_the_notice_and_no_error(
    path: Path, cuts: tuple[Cut, ...]
) -> None:
    service, other = Lines(path), Lines(path.with_name("other.log"), size=50)
    for log in (service, other):
        log.write(HEAD)
        cut(log.path, cuts)
        log.write(HEAD)
    own = last_lines(path, 1).place
    forged = [
        last_lines(other.path, 1).place,
        Place(own.log, own.copy, 10**20 - 1, own.check),
        Place(own.log, own.copy, -(10**20) + 1, own.check),
        Place(own.log, own.copy, own.offset - 7, own.check),
        Place(own.log, own.copy + 1, own.offset, own.check),
        Place(own.log + 1, own.copy, own.offset, own.check),
        Place.parse("1.2.3.4"),
    ]
    for place in forged:
        piece = lines_after(path, Place.parse(str(place)))
        assert piece.cut, place
        assert piece.lines[1:] == service.last(len(piece.lines) - 1)  # a forged inode says that a line begins there
    for text in (
        "",
        "1-2",
        "1.2.3",
        "1.2.3.4.5",
        "1.2.--3.4",
        "1.2.3.4\n",
        "1.2.3.x",
        "١.2.3.4",
        "1.2." + "9" * 21 + ".4",
    ):
        with pytest.raises(ValueError, match="not a place"):
            Place.parse(text)


def test_more_than_is_read_at_once_gives_the_notice_and_the_latest_whole_lines(
    path: Path, cuts: tuple[Cut, ...]
) -> None:
    service = Lines(path, 900)
    service.write(HEAD)
    place = last_lines(path, 1)
    for _ in range(3):
        service.write(MOST_BYTES // 2)
        cut(path, cuts)
    piece = follow(path, place)
    assert piece.cut
    assert piece.lines == service.last(len(piece.lines))
    assert len(piece.lines) >= MOST_BYTES // 900 - 1


def test_a_log_that_was_replaced_or_emptied_by_hand_is_read_from_its_beginning_with_the_notice(
    path: Path, cuts: tuple[Cut, ...]
) -> None:
    service = Lines(path)
    service.write(HEAD)
    cut(path, cuts)
    service.write(100)
    place = last_lines(path, 1)
    kept = path.rename(path.with_name("kept"))
    path.write_bytes(b"first\nsecond\n")
    piece = follow(path, place)
    assert (piece.lines, piece.cut) == (["first", "second"], True)
    kept.rename(path)
    os.truncate(path, 0)
    piece = follow(path, place)
    assert (piece.lines, piece.cut) == ([], True)
    service.write(100)
    assert follow(path, piece).lines == service.last(3)


def test_a_log_that_comes_later_is_followed_from_its_beginning(path: Path, cuts: tuple[Cut, ...]) -> None:
    piece = last_lines(path, 5)
    assert follow(path, piece) == piece
    service = Lines(path)
    service.write(100)
    found = follow(path, piece)
    assert (found.lines, found.cut) == (service.last(3), False)
    service.write(HEAD)
    cut(path, cuts)
    assert follow(path, found).lines == service.last(service.count - 3)


def test_reading_waits_for_no_cut_that_hangs(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Lines(path).write(100)
    monkeypatch.setattr(logs, "PATIENCE", 0.01)
    with at_rest(soon()), pytest.raises(TimeoutError, match="does not end"):
        last_lines(path, 1)
    assert len(last_lines(path, 1).lines) == 1


def test_a_reader_that_hangs_holds_up_no_rotation_beyond_its_deadline(path: Path, cuts: tuple[Cut, ...]) -> None:
    service = Lines(path)
    service.write(HEAD)
    with at_rest(soon()), pytest.raises(TimeoutError, match="does not end"):
        rotate(path, rules(), deadline=boot_time() + 0.5, cuts=cuts)
    assert last_lines(path, 5000).lines == service.last(5000)
    assert cut(path, cuts) is cuts[0]
    assert last_lines(path, 5000).lines == service.last(5000)


def test_gpuward_service_logs_f_shows_each_line_once_over_the_rotations_of_a_node(make_node: Make) -> None:
    node = make_node(ttl=LONG_TTL).after_an_orderly_end()
    go, total = node.folder / "go", 600_000
    script = (
        f'echo ready; until [ -e {go} ]; do sleep 0.05; done; seq {total} | {sys.executable} -c "$1"; exec sleep 1000'
    )
    node.add_service("chatty", "sh", "-c", script, "sh", SLOWLY, log={"max_size": "1MB", "keep": 2})
    node.start().until_leading()
    log = node.folder / "log" / "chatty.log"
    node.until(lambda: log.exists() and log.stat().st_size)
    command = [sys.executable, "-m", "supervisor.entry", "service", "logs", "chatty", "-f", "--run-dir", str(node.run)]
    seen: list[str] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as follower:
        assert follower.stdout is not None
        assert follower.stderr is not None
        reader = threading.Thread(target=lambda: seen.extend(iter(follower.stdout.readline, "")))  # type: ignore[union-attr]
        reader.start()
        try:
            node.until(lambda: seen == ["ready\n"])
            go.touch()
            node.until(lambda: seen[-1] == f"{total}\n", within=2 * PATIENCE)
        finally:
            follower.terminate()
            notices = follower.stderr.read()
            reader.join()
    assert seen == ["ready\n", *(f"{number}\n" for number in range(1, total + 1))]
    assert notices == ""
    assert log.with_name("chatty.log.1").exists()
