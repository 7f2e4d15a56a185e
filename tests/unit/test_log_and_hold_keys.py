"""The keys `max_hold` and `log` of a service."""

from pathlib import Path

import pytest

from tests.unit.config_samples import SMALL, loaded, one_problem


def test_a_log_is_cut_at_50_mb_and_ten_pieces_are_kept_unless_it_says_otherwise(tmp_path: Path) -> None:
    log = loaded(tmp_path, SMALL).services["trainer"].log
    assert (log.max_size, log.keep) == (50_000_000, 10)


@pytest.mark.parametrize(
    ("written", "size"), [("50MB", 50_000_000), ("1500kB", 1_500_000), ("2GB", 2_000_000_000), ("1000000", 1_000_000)]
)
def test_sizes_are_read_with_and_without_a_unit(tmp_path: Path, written: str, size: int) -> None:
    text = SMALL + f"    log: {{max_size: {written}, keep: 3}}\n"
    log = loaded(tmp_path, text).services["trainer"].log
    assert (log.max_size, log.keep) == (size, 3)


@pytest.mark.parametrize(
    "written", ["50", "50 MB", "50M", "999kB", "1001GB", "1.5MB", "-1MB", "true", "[]", "mb", "1e9"]
)
def test_other_texts_are_no_sizes(tmp_path: Path, written: str) -> None:
    problem = one_problem(tmp_path, SMALL + f"    log: {{max_size: {written}}}\n")
    assert problem.path == "services.trainer.log.max_size"
    assert "50MB" in problem.expected


@pytest.mark.parametrize("written", ["0", "-1", "1001", "many"])
def test_at_least_one_piece_is_kept(tmp_path: Path, written: str) -> None:
    assert one_problem(tmp_path, SMALL + f"    log: {{keep: {written}}}\n").path == "services.trainer.log.keep"


def test_how_long_a_lock_may_be_held_is_a_duration_and_needs_a_gpu(tmp_path: Path) -> None:
    assert loaded(tmp_path, SMALL).services["trainer"].max_hold is None
    assert loaded(tmp_path, SMALL + "    max_hold: 8h\n").services["trainer"].max_hold == 8 * 3600
    assert one_problem(tmp_path, SMALL + "    max_hold: 0s\n").path == "services.trainer.max_hold"
    without = SMALL.replace("    gpu: 0\n    lock: lifetime\n", "    max_hold: 8h\n")
    assert "gpu" in one_problem(tmp_path, without).expected
