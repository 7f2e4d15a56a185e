"""What services say by sd_notify: read, kept within bounds, and never believed beyond that."""

import socket
import threading
from pathlib import Path

import pytest

from supervisor import notify
from supervisor.keeper.notify import parse
from supervisor.service.probe import missing_model
from supervisor.service.said import LONGEST_MORE, MOST_SECTIONS, Said


def test_sections_are_told_apart_by_process_and_id() -> None:
    said = Said()
    for pid, number in ((1, "1"), (1, "2"), (2, "1")):
        said.take(pid, {"X_GPU_SECTION": "begin", "X_GPU_SECTION_ID": number}, float(pid))
    said.take(1, {"X_GPU_SECTION": "end", "X_GPU_SECTION_ID": "1"}, 9.0)
    assert said.sections == {(1, "2"): 1.0, (2, "1"): 2.0}


def test_a_section_that_begins_again_has_ended_before_although_that_was_lost() -> None:
    said = Said()
    said.take(1, {"X_GPU_SECTION": "begin"}, 1.0)
    said.take(1, {"X_GPU_SECTION": "begin"}, 50.0)
    assert said.sections == {(1, ""): 50.0}


def test_sections_of_processes_that_have_ended_make_room_for_others() -> None:
    said = Said()
    for pid in range(1, MOST_SECTIONS + 1):
        said.take(pid, {"X_GPU_SECTION": "begin"}, 1.0)
    said.forget_all_but({1})
    said.take(999, {"X_GPU_SECTION": "begin"}, 2.0)
    assert said.sections == {(1, ""): 1.0, (999, ""): 2.0}


def test_the_number_of_sections_and_the_time_asked_for_have_bounds() -> None:
    said = Said()
    for number in range(MOST_SECTIONS + 10):
        said.take(1, {"X_GPU_SECTION": "begin", "X_GPU_SECTION_ID": str(number)}, 1.0)
    said.take(1, {"EXTEND_TIMEOUT_USEC": "9" * 200}, 10.0)
    assert len(said.sections) == MOST_SECTIONS
    assert said.more_until == 10.0 + LONGEST_MORE


@pytest.mark.parametrize("nonsense", ["-1", "1e9", "", "٣", "0x10"])
def test_nonsense_gives_no_time(nonsense: str) -> None:
    said = Said()
    said.take(1, {"EXTEND_TIMEOUT_USEC": nonsense}, 10.0)
    assert said.more_until == 0.0


def test_only_known_variables_are_forwarded_and_long_values_cut() -> None:
    assert parse(b"READY=1\nMAINPID=1\nFDSTORE=1\nSTATUS=" + b"x" * 1000 + b"\nno equals\n\xff\xfe=1") == {
        "READY": "1",
        "STATUS": "x" * 256,
    }


@pytest.mark.parametrize(
    ("body", "trouble"),
    [
        (b'{"data": [{"id": "a"}, {"id": "b"}]}', None),
        (b'{"data": [{"id": "a"}]}', "model b is not served, but a"),
        (b'{"data": []}', "model b is not served, but none"),
    ],
)
def test_whether_a_model_is_served(body: bytes, trouble: str | None) -> None:
    assert missing_model(body, "b") == trouble


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"data": 1}', b'{"data": [1]}', b"[" * 100_000])
def test_an_answer_without_models_is_told_as_such(body: bytes) -> None:
    with pytest.raises(ValueError, match="the answer is no"):
        missing_model(body, "b")


def test_the_helper_does_nothing_without_a_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    assert not notify.ready()
    monkeypatch.setenv("NOTIFY_SOCKET", "/no/such/socket")
    with notify.gpu_section():
        assert not notify.heartbeat()


def test_the_helper_never_blocks_on_a_socket_that_nobody_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(tmp_path / "s")
    monkeypatch.setenv("NOTIFY_SOCKET", path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as deaf:
        deaf.bind(path)

        def fill() -> None:
            while notify.heartbeat():
                pass
            with notify.gpu_section():
                pass

        thread = threading.Thread(target=fill, daemon=True)
        thread.start()
        thread.join(10)
        assert not thread.is_alive()
