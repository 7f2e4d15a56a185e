from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from supervisor.config.loading import load, warnings
from supervisor.config.problems import ConfigErrors
from tests.unit.config_samples import SMALL

EXAMPLE = (Path(__file__).parents[2] / "examples" / "gpuward.yml").read_text()
PIECES = st.text("\t\n\0\u2028\ufeff :-[]{}'\"&*a<!#|>%~=é01", min_size=1, max_size=4) | st.sampled_from(
    ["<<: *a", "---", "no", "on", "null", "0o7", "010", "1:30", ".inf", ".nan", "-1", "9" * 40]
)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=12)
    | st.sampled_from(["5m", "/x", "a@b"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6) | st.integers(), inner, max_size=3),
    max_leaves=6,
)


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with TemporaryDirectory() as name:
        yield Path(name)


def attempt(folder: Path, content: bytes) -> None:
    """Loads; anything but a configuration or its errors fails the test."""
    path = folder / "gpuward.yml"
    path.write_bytes(content)
    problems = None
    try:
        warnings(load(path))
    except ConfigErrors as errors:
        problems = errors.problems
    assert problems is None or len(problems) > 0
    assert not any("\n" in str(problem) for problem in problems or ())


many = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@many
@given(st.lists(st.tuples(st.integers(0, 400), st.integers(0, 8), PIECES), min_size=1, max_size=5))
def test_a_mangled_configuration_never_raises_anything_but_its_errors(
    folder: Path, edits: list[tuple[int, int, str]]
) -> None:
    text = SMALL
    for start, length, piece in edits:
        text = text[:start] + piece + text[start + length :]
    attempt(folder, text.encode("utf-8", "surrogatepass"))


@many
@given(st.integers(0, 60), VALUES)
def test_any_value_at_any_key_never_raises_anything_but_its_errors(folder: Path, which: int, value: object) -> None:
    data = yaml.safe_load(EXAMPLE)
    places = [(section, key) for section in sections(data) for key in section]
    section, key = places[which % len(places)]
    section[key] = value
    attempt(folder, yaml.safe_dump(data, allow_unicode=True).encode("utf-8", "surrogatepass"))


def sections(data: object) -> Iterator[dict[object, object]]:
    if isinstance(data, dict):
        yield data
        for value in data.values():
            yield from sections(value)


@many
@given(st.binary(max_size=200))
def test_any_bytes_never_raise_anything_but_errors(folder: Path, content: bytes) -> None:
    attempt(folder, content)
