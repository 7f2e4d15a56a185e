"""Logs are cut while their services write into them: on ext4, on tmpfs, and as where one can only truncate."""

import asyncio
import contextlib
import errno
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from election.clock import BootClock, boot_time
from supervisor.config.service import Log
from supervisor.files import UnsafeFileError
from supervisor.service import logfile
from supervisor.service.logfile import ALIGN, Cut, Rotation, copies, rotate
from tests.bed.keeper import NOBODY, soon, until
from tests.bed.nodes import LONG_TTL, Make

HEAD = 3 * ALIGN


def rules(max_size: int = 2 * ALIGN, keep: int = 10) -> Log:
    """Smaller than a configuration may say."""
    return Log.model_construct(max_size=max_size, keep=keep)


@pytest.fixture(params=["collapse", "punch", "truncate"])
def cuts(request: pytest.FixtureRequest) -> tuple[Cut, ...]:
    """The way that is to be taken: what a file system cannot do is left out of the list."""
    return tuple(Cut)[tuple(Cut).index(Cut(request.param)) :]


@pytest.fixture
def path(cuts: tuple[Cut, ...], tmp_path: Path) -> Iterator[Path]:
    """A log on a file system for this way: punching is tried where collapsing is really refused."""
    if cuts[0] is not Cut.PUNCH:
        yield tmp_path / "svc.log"
        return
    with tempfile.TemporaryDirectory(prefix="gpuward-test-", dir="/dev/shm") as folder:
        yield Path(folder) / "svc.log"


def cut(path: Path, cuts: tuple[Cut, ...] = tuple(Cut), **fields: int) -> Cut | None:
    return rotate(path, rules(**fields), deadline=soon(), cuts=cuts)


def write(path: Path, data: bytes) -> None:
    """As a service does."""
    with path.open("ab", buffering=0) as file:
        file.write(data)


def lines(first: int, size: int) -> bytes:
    """Lines that are all different, some bytes no UTF-8, at least `size` bytes together."""
    count = size // 40 + 1
    return b"".join(b"%08d %s\n" % (first + number, b"\xe9\xff\x00" * 10) for number in range(count))


def piece(path: Path) -> bytes:
    """What a file has behind its hole."""
    data = path.read_bytes()
    with path.open("rb") as file, contextlib.suppress(OSError):
        return data[os.lseek(file.fileno(), 0, os.SEEK_DATA) :]
    return b""


def whole(path: Path) -> bytes:
    """All that there is of a log, the oldest first."""
    return b"".join(found.read_bytes() for found in reversed(copies(path))) + piece(path)


def left_over(path: Path) -> list[str]:
    return [found.name for found in path.parent.iterdir() if found.name.startswith(f".{path.name}.")]


def test_the_head_moves_and_nothing_is_lost(path: Path, cuts: tuple[Cut, ...]) -> None:
    expected = lines(0, HEAD)
    write(path, expected)
    assert cut(path, cuts) is cuts[0]
    assert len(piece(path)) <= ALIGN
    assert whole(path) == expected
    assert left_over(path) == []
    assert path.with_name("svc.log.1").stat().st_mode & 0o777 == path.stat().st_mode & 0o777


def test_a_cut_frees_the_blocks_of_the_head(path: Path, cuts: tuple[Cut, ...]) -> None:
    write(path, lines(0, HEAD))
    before = path.stat().st_blocks
    cut(path, cuts)
    assert path.stat().st_blocks * 512 <= before * 512 - 2 * ALIGN


def test_a_file_that_stays_open_is_cut_again_and_again_and_at_most_keep_pieces_stay(
    path: Path, cuts: tuple[Cut, ...]
) -> None:
    pieces = []
    with path.open("ab", buffering=0) as service:
        for turn in range(6):
            service.write(lines(turn * 100000, HEAD))
            assert cut(path, cuts, keep=3) is cuts[0]
            pieces.append(path.with_name("svc.log.1").read_bytes())
    assert [found.name for found in copies(path)] == ["svc.log.1", "svc.log.2", "svc.log.3"]
    assert [found.read_bytes() for found in copies(path)] == pieces[:-4:-1]
    assert whole(path) == (b"".join(pieces) + piece(path))[-len(whole(path)) :]


def test_a_short_log_is_left_alone(path: Path, cuts: tuple[Cut, ...]) -> None:
    assert cut(path, cuts) is None
    write(path, lines(0, ALIGN))
    assert cut(path, cuts) is None
    assert copies(path) == []


def test_a_lowered_keep_removes_what_is_over(path: Path, cuts: tuple[Cut, ...]) -> None:
    for number in range(1, 9):
        path.with_name(f"svc.log.{number}").write_bytes(b"%d" % number)
    write(path, lines(0, HEAD))
    cut(path, cuts, keep=2)
    assert len(copies(path)) == 2
    assert copies(path)[1].read_bytes() == b"1"


def dies_before_step(number: int, path: Path, cuts: tuple[Cut, ...]) -> bool:
    """Rotates in a child that is killed before its so-manieth change; False: it came to the end."""
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            _arm(number)
            cut(path, cuts, keep=4)
            os._exit(0)
        os._exit(1)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) in (0, -signal.SIGKILL)
    return status != 0


def _arm(number: int) -> None:
    done = 0

    def before(work: Callable[..., object]) -> Callable[..., object]:
        def step(*args: object, **kwargs: object) -> object:
            nonlocal done
            done += 1
            if done == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return work(*args, **kwargs)

        return step

    for name in ("open", "write", "fsync", "fdatasync", "fchmod", "rename", "unlink", "ftruncate"):
        setattr(os, name, before(getattr(os, name)))
    logfile.libc_fallocate = before(logfile.libc_fallocate)  # type: ignore[assignment]


def test_killed_before_any_step_nothing_is_lost_and_nothing_is_there_twice(path: Path, cuts: tuple[Cut, ...]) -> None:
    number = 0
    while True:
        number += 1
        for old in path.parent.iterdir():
            old.unlink()
        path.with_name("svc.log.2").write_bytes(b"oldest\n")
        path.with_name("svc.log.1").write_bytes(b"older\n")
        expected = b"oldest\nolder\n" + lines(0, HEAD)
        write(path, lines(0, HEAD))
        killed = dies_before_step(number, path, cuts)
        write(path, lines(500000, HEAD))
        cut(path, cuts, keep=4)
        assert whole(path) == expected + lines(500000, HEAD), f"killed before step {number}"
        assert left_over(path) == []
        if not killed:
            break
    assert number > 12


def test_a_service_that_writes_long_latin_1_lines_is_not_held_up_and_loses_none(tmp_path: Path) -> None:
    """Supervisor 638, 1554: a long line or bytes that are no UTF-8 stopped the log reader, and the child with it.

    50 MB in lines of 200 kB within two seconds, cut at 5 MB.
    """
    path = tmp_path / "svc.log"
    code = """
import json, os, sys, time
longest = 0.0
began = time.monotonic()
for number in range(250):
    while number in (100, 200) and not os.path.exists(sys.argv[1] + ".%d" % (number // 100)):
        time.sleep(0.005)  # a cut is due
    line = b"%06d " % number + b"\\xe9\\xfc\\xdf" * 66664 + b"\\n"
    before = time.monotonic()
    while line:
        line = line[os.write(1, line):]
    longest = max(longest, time.monotonic() - before)
    time.sleep(max(0.0, began + number * 0.008 - time.monotonic()))
json.dump({"longest": longest, "took": time.monotonic() - began}, sys.stderr)
"""
    stop = threading.Event()
    done: list[Cut | None] = []

    def keep_cutting() -> None:
        while not stop.wait(0.005):
            done.append(cut(path, max_size=5_000_000, keep=100))

    cutter = threading.Thread(target=keep_cutting)
    words = [sys.executable, "-c", code, str(path)]
    with path.open("ab") as output, subprocess.Popen(words, stdout=output, stderr=subprocess.PIPE) as writer:
        cutter.start()
        try:
            said = json.loads(writer.communicate()[1])
        finally:
            writer.kill()
            stop.set()
            cutter.join()
    print(f"longest write {said['longest']:.3f} s, all {said['took']:.2f} s, {len(copies(path))} cuts")
    expected = b"".join(b"%06d " % number + b"\xe9\xfc\xdf" * 66664 + b"\n" for number in range(250))
    assert whole(path) == expected
    assert len([how for how in done if how is not None]) == len(copies(path)) >= 2
    assert said["longest"] < 10  # who waits for a log reader that has stopped waits for ever


def test_a_link_in_place_of_a_log_is_refused(tmp_path: Path) -> None:
    target, path = tmp_path / "target", tmp_path / "svc.log"
    target.write_bytes(lines(0, HEAD))
    path.symlink_to(target)
    with pytest.raises(OSError) as error:  # noqa: PT011 - the number is what is looked at
        cut(path)
    assert error.value.errno == errno.ELOOP
    path.unlink()
    os.link(target, path)
    with pytest.raises(UnsafeFileError, match="another name"):
        cut(path)
    assert target.read_bytes() == lines(0, HEAD)


def test_a_strangers_file_or_no_file_in_place_of_a_log_is_refused(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to make another user's file")
    path = tmp_path / "svc.log"
    write(path, lines(0, HEAD))
    os.chown(path, NOBODY, NOBODY)
    with pytest.raises(UnsafeFileError, match=f"owner {NOBODY}"):
        cut(path)
    assert path.read_bytes() == lines(0, HEAD)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(UnsafeFileError, match="not a regular file"):
        cut(path)


def test_what_lies_in_the_way_of_the_copy_is_never_written_through(tmp_path: Path) -> None:
    path, target = tmp_path / "svc.log", tmp_path / "target"
    target.write_bytes(b"precious")
    write(path, lines(0, HEAD))
    for name in (".svc.log.copying", "svc.log.1"):
        path.with_name(name).symlink_to(target)
    cut(path)
    assert target.read_bytes() == b"precious"
    path.with_name(".svc.log.pending").symlink_to(target)
    with pytest.raises(OSError, match="symbolic links"):
        cut(path)


def test_after_the_deadline_the_log_is_as_it_was(path: Path, cuts: tuple[Cut, ...]) -> None:
    write(path, lines(0, HEAD))
    with pytest.raises(TimeoutError):
        rotate(path, rules(), deadline=boot_time() - 1, cuts=cuts)
    assert path.read_bytes() == lines(0, HEAD)
    assert left_over(path) == []


class Told:
    """All logs of a node under rotation; what it told."""

    def __init__(self, *logs: Path) -> None:
        self.events: list[str] = []
        self.clock = BootClock()
        self.rotation = Rotation({path.stem: (path, rules()) for path in logs}, self.clock, self.events.append)


async def test_without_room_for_a_copy_it_is_told_once_and_the_service_writes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """mikopbx/Core 1051: a full disk ended in a crash loop."""
    monkeypatch.setattr(logfile, "SPARE", 1 << 60)
    monkeypatch.setattr(logfile, "RETRY", 0.0)
    path, other = tmp_path / "svc.log", tmp_path / "other.log"
    write(path, lines(0, HEAD))
    told = Told(path, other)
    for _ in range(3):
        await told.rotation.look()
    assert len(told.events) == 1
    assert "svc: its log is not rotated, and grows: No space left on device" in told.events[0]
    write(path, b"still here\n")
    assert path.read_bytes() == lines(0, HEAD) + b"still here\n"
    monkeypatch.setattr(logfile, "SPARE", 0)
    await told.rotation.look()
    assert whole(path) == lines(0, HEAD) + b"still here\n"


async def test_a_write_error_under_the_copy_leaves_the_log_alone(tmp_path: Path) -> None:
    path = tmp_path / "svc.log"
    write(path, lines(0, HEAD))
    told = Told(path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (ALIGN, hard))
    try:
        await told.rotation.look()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, old)
    assert "File too large" in told.events[0]
    assert path.read_bytes() == lines(0, HEAD)
    assert left_over(path) == []
    assert copies(path) == []


async def test_one_log_in_trouble_does_not_hold_up_the_others(tmp_path: Path) -> None:
    bad, good = tmp_path / "bad.log", tmp_path / "good.log"
    bad.symlink_to(good)
    write(good, lines(0, HEAD))
    told = Told(bad, good)
    await told.rotation.look()
    assert told.events == ["bad: its log is not rotated, and grows: a symbolic link stands in its place"]
    assert len(copies(good)) == 1


async def test_a_rotation_that_hangs_blocks_neither_the_loop_nor_is_a_second_one_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """patroni 2388: a dead disk must not stop the loop."""
    first, second = tmp_path / "first.log", tmp_path / "second.log"
    for path in (first, second):
        write(path, lines(0, HEAD))
    goes_on, began = threading.Event(), []

    def hangs(path: Path, *_: object, **__: object) -> None:
        began.append(path.name)
        goes_on.wait(30)

    monkeypatch.setattr(logfile, "rotate", hangs)
    monkeypatch.setattr(logfile, "LIMIT", 0.5)
    monkeypatch.setattr(logfile, "STUCK", 0.5)
    told = Told(first, second)
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0.001)

    counting = asyncio.create_task(count())
    await told.rotation.look()
    await told.rotation.look()
    counting.cancel()
    assert turns > 10
    assert began == ["first.log"]
    assert len(told.events) == 1
    goes_on.set()
    await until(lambda: not told.rotation._aside.stuck, "the thread to return")
    await told.rotation.look()
    assert began == ["first.log", "second.log"]


async def test_what_a_killed_rotation_has_left_is_finished_though_the_log_is_short(tmp_path: Path) -> None:
    path = tmp_path / "svc.log"
    path.with_name(".svc.log.pending").write_bytes(b"cut off already\n")
    path.with_name(".svc.log.copying").write_bytes(b"half")
    write(path, b"after it\n")
    await Told(path).rotation.look()
    assert whole(path) == b"cut off already\nafter it\n"
    assert left_over(path) == []


def test_a_node_rotates_the_logs_of_its_services(make_node: Make) -> None:
    node = make_node(ttl=LONG_TTL).after_an_orderly_end()
    script = "yes 0123456789abcdef | head -c 3000000; exec sleep 1000"
    node.add_service("chatty", "sh", "-c", script, log={"max_size": "1MB", "keep": 2})
    node.start().until_leading()
    log = node.folder / "log" / "chatty.log"
    node.until(lambda: log.with_name("chatty.log.1").exists() and log.stat().st_size <= ALIGN)
    assert len(whole(log)) == 3_000_000
    assert set(whole(log).split(b"\n")[:-1]) == {b"0123456789abcdef"}
