"""The supervisor's own log on a full disk, and on a pipe that nobody reads."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from supervisor.log import LogStream
from tests.bed.nodes import LONG_TTL, Make

LINE = "x" * 99 + "\n"


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for fd in ends:
        os.close(fd)


def drained(reader: int) -> str:
    return os.read(reader, 1 << 20).decode()


def test_a_pipe_that_nobody_reads_is_not_waited_for_and_the_lost_lines_are_counted(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    stream = LogStream(writer)
    for _ in range(2000):
        stream.write(LINE)
    before = drained(reader)
    assert set(before.splitlines()) == {LINE[:-1]}
    stream.write("again\n")
    lost = 2000 - before.count("\n")
    assert lost > 0
    assert drained(reader) == f"{lost} lines of this log could not be written\nagain\n"
    stream.write("and again\n")
    assert drained(reader) == "and again\n"


def test_a_line_longer_than_a_pipe_takes_at_once_arrives_whole(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    LogStream(writer).write("y" * 20_000 + "\n")
    assert drained(reader) == "y" * 20_000 + "\n"


def test_a_full_disk_and_a_reader_that_has_gone_raise_nothing(pipe: tuple[int, int]) -> None:
    with open("/dev/full", "wb", buffering=0) as full:
        LogStream(full.fileno()).write(LINE)
    reader, writer = os.pipe()
    os.close(reader)
    LogStream(writer).write(LINE)
    os.close(writer)


def test_a_node_whose_log_cannot_be_written_leads_restarts_a_service_and_leaves_in_good_order(make_node: Make) -> None:
    node = make_node(ttl=LONG_TTL).after_an_orderly_end()
    node.add_service("one", "sleep", "1000")
    node.out = Path("/dev/full")
    node.start().until_leading()
    (pid,) = node.service_pids()
    os.kill(pid, signal.SIGKILL)
    node.until(lambda: node.service_pids() not in ([], [pid]))
    assert node.leads()
    node.signal(signal.SIGTERM)
    assert node.exit_code() == 0
