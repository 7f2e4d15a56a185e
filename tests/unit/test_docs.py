"""The documentation is true of the code: its commands parse, its links resolve, its tables are those of the code."""

import ast
import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from pydantic import BaseModel

from election.membership import MemberRecord
from election.record import Keys, LeaderRecord, SettingsRecord, SwitchoverRecord, TermRecord
from election.timing import Timing
from supervisor.cli import lock_run
from supervisor.cli.app import app
from supervisor.config.loading import ConfigErrors, load
from supervisor.config.service import Service
from supervisor.config.values import duration
from supervisor.demo import faults
from supervisor.service import restart
from supervisor.service.states import TRANSITIONS
from supervisor.watchdog.verdict import Kind
from tests.unit.config_samples import SMALL, write

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")])
CODE = [path for folder in ("election", "supervisor") for path in (ROOT / folder).rglob("*.py")]
OURS = ("election", "supervisor", "tests", "benchmarks", "examples", "tools", "docs")
TIMES = ("refresh", "give-up", "kill", "switch", "TTL", "retry", "attempt", "verify")


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    page: str
    kind: str
    text: str


def blocks(*kinds: str) -> list[Block]:
    """Those of all pages."""
    found = []
    for page in PAGES:
        for match in re.finditer(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL):
            found.append(Block(page.name, match[1], match[2]))
    return [block for block in found if block.kind in kinds]


def commands(program: str) -> list[tuple[str, list[str]]]:
    """(page, words) of every line in a fenced block that runs this program."""
    return [
        (block.page, words)
        for block in blocks("sh", "console")
        for line in block.text.splitlines()
        if block.kind == "sh" or line.startswith("$ ")
        if (words := _words(line.removeprefix("$ ")))[:1] == [program]
    ]


def _words(line: str) -> list[str]:
    words = shlex.split(line, comments=True)
    while words and re.fullmatch(r"sudo|[A-Z_]+=.*", words[0]):
        words.pop(0)
    return [words[0].removeprefix(".venv/bin/"), *words[1:]] if words else []


def parse(words: list[str]) -> dict[str, Any]:
    """The parameters that the command line makes of it. Raises where there is no such command or option."""
    command: Any = typer.main.get_command(app)
    while hasattr(command, "commands") and not words[0].startswith("-"):
        command, words = command.commands[words[0]], words[1:]
    params: dict[str, Any] = command.make_context(command.name, list(words)).params
    return params


def page(name: str) -> str:
    return (ROOT / name).read_text()


def table(text: str, first: str) -> list[list[str]]:
    """The rows of the table whose header begins with this cell."""
    lines = iter(text.splitlines())
    for line in lines:
        if line.startswith(f"| {first} |"):
            next(lines)
            return list(_rows(lines))
    raise AssertionError(f"no table begins with {first}")


def _rows(lines: Iterator[str]) -> Iterator[list[str]]:
    for line in lines:
        if not line.startswith("|"):
            return
        yield [cell.strip().strip("`") for cell in line.strip("|").split("|")]


GPUWARD = commands("gpuward")


def test_the_documents_show_every_command() -> None:
    group: Any = typer.main.get_command(app)
    assert {words[1] for _, words in GPUWARD} >= group.commands.keys() - {"version"}


@pytest.mark.parametrize(("where", "words"), GPUWARD, ids=lambda value: value if isinstance(value, str) else "")
def test_the_command_line_accepts_every_command_that_is_shown(where: str, words: list[str]) -> None:
    if words[1:3] == ["lock", "run"]:
        assert lock_run._parse(words[3:])[1]
        return
    given = parse(words[1:])
    if words[1] == "demo":
        fault = faults.make(given["fault"])
        assert fault.available(given["store"])
        assert duration(given["duration"]) >= fault.needs(given["ttl"]), f"{where}: too short to show {fault.name}"
    if "config" in given and not Path(given["config"]).is_absolute():
        assert (ROOT / given["config"]).is_file()


@pytest.mark.parametrize("target", sorted({words[1] for _, words in commands("make")}))
def test_every_make_target_that_is_shown_exists(target: str) -> None:
    assert re.search(rf"^{target}:.*##", page("Makefile"), re.MULTILINE)


def test_the_readme_names_every_fault_of_the_demo() -> None:
    named = {name for row in table(page("README.md"), "fault") for name in re.findall(r"[a-z-]+", row[0])}
    assert named == set(faults.NAMES)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_relative_link_resolves(path: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        if not re.match(r"https?:", target):
            assert (path.parent / target.partition("#")[0]).exists(), f"{path.name}: {target}"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_file_of_ours_that_is_named_exists(path: Path) -> None:
    for name in re.findall(r"`((?:" + "|".join(OURS) + r")/[\w./*-]*)`", path.read_text()):
        assert list(ROOT.glob(name)), f"{path.name}: {name}"


@pytest.mark.parametrize("block", blocks("yaml"), ids=lambda block: block.page)
def test_every_configuration_that_is_shown_is_valid(tmp_path: Path, block: Block) -> None:
    shown = yaml.safe_load(block.text)
    whole = yaml.safe_load(SMALL) | shown
    for service in whole["services"].values():
        service["user"] = yaml.safe_load(SMALL)["services"]["trainer"]["user"]
    try:
        load(write(tmp_path, yaml.safe_dump(whole)))
    except ConfigErrors as errors:
        pytest.fail("\n".join(map(str, errors.problems)))


def test_the_readme_makes_the_node_to_try_as_it_says(tmp_path: Path) -> None:
    """Its lines up to the start make a valid configuration, and the later lines name what it has."""
    block = next(block.text for block in blocks("sh") if "examples/try.yml" in block.text)
    prepare = block.partition(".venv/bin/gpuward run")[0].replace("/tmp/gpuward-try", str(tmp_path / "try"))
    script = f'{prepare}\necho "$GPUWARD_CONFIG"'
    done = subprocess.run(["sh", "-eu", "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    made = load(Path(done.stdout.strip()))
    assert made.election.ttl == 6
    assert f"lock run --run-dir {made.paths.run} -- " in block
    assert {words[3] for _, words in GPUWARD if words[1:2] == ["service"] and "clock" in words} <= set(made.services)


def test_the_service_keys_are_those_of_the_schema() -> None:
    cells = [row[0] for row in table(page("docs/services.md"), "key")]
    assert sorted(name for cell in cells for name in re.findall(r"\w+", cell)) == sorted(Service.model_fields)


def test_the_state_table_is_that_of_the_code() -> None:
    shown = {(row[0], row[1]): row[2] for row in table(page("docs/services.md"), "from")}
    assert shown == {(old.value, new.value): why for (old, new), why in TRANSITIONS.items()}


def test_the_restart_table_is_what_the_accounting_does() -> None:
    policy, account = restart.Policy(), restart.CLEAR
    follows: list[str] = []
    while not account.degraded:
        account, decision = restart.failed(
            policy, account, was_ready=True, healthy_since=None, now=1000.0 + len(follows)
        )
        follows.append(_in_words(decision))
    assert [row[1] for row in table(page("docs/services.md"), "failure")] == follows
    assert (policy.window, policy.healthy) == (300, 600)


def _in_words(decision: restart.Decision) -> str:
    if isinstance(decision, restart.Backoff):
        return f"restart after {decision.seconds:g} s"
    return "restart at once" if isinstance(decision, restart.RestartNow) else "degraded"


def test_the_verdicts_are_those_of_the_watchdog() -> None:
    assert {row[0] for row in table(page("docs/services.md"), "verdict")} == {kind.value for kind in Kind}


def test_the_timing_tables_are_what_the_formula_gives() -> None:
    text = page("docs/election.md")
    rows = {row[0]: row[1:4] for first in ("t0 +", "period") for row in table(text, first)}
    assert tuple(rows) == TIMES
    for name, cells in rows.items():
        field = name.lower().replace("-", "_")
        assert cells == [f"{getattr(Timing(ttl), field):.3g}" for ttl in (90, 9, 6)], name


def test_every_rule_that_a_comment_names_stands_in_the_election_page() -> None:
    stated = {int(number) for number in re.findall(r"^(\d+)\. ", page("docs/election.md"), re.MULTILINE)}
    named = {int(n) for path in CODE for n in re.findall(r"\brules? (\d+)", path.read_text())}
    assert stated == set(range(1, 23))
    assert named <= stated


def test_every_heading_of_the_gpu_facts_that_a_docstring_names_exists() -> None:
    headings = set(re.findall(r"^## (.+)$", page("docs/gpu-facts.md"), re.MULTILINE))
    named = {name for path in CODE for name in re.findall(r'gpu-facts,\s+"([^"]+)"', path.read_text())}
    assert named <= headings
    assert headings >= {"Identity", "Reset", "Killing"}


@pytest.mark.parametrize("block", blocks("python"), ids=lambda block: block.page)
def test_every_import_of_a_python_example_works(block: Block) -> None:
    imports = [node for node in ast.parse(block.text).body if isinstance(node, ast.ImportFrom | ast.Import)]
    assert imports
    exec(compile(ast.Module([*imports], []), block.page, "exec"), {})


@pytest.mark.parametrize(
    ("key", "kind"),
    [
        ("leader", LeaderRecord),
        ("term", TermRecord),
        ("members/gpu1", MemberRecord),
        ("config", SettingsRecord),
        ("switchover", SwitchoverRecord),
    ],
)
def test_the_record_that_is_shown_has_the_fields_of_the_code(key: str, kind: type[BaseModel]) -> None:
    whole = next(block.text for block in blocks("text") if "/gpuward/prod/leader" in block.text)
    shown = next(part for part in whole.split("\n\n") if part.startswith(f"{Keys('prod').prefix}{key} "))
    value = json.loads(shown.partition("\n")[2])
    kind.model_validate_json(json.dumps(value))
    assert list(value) == list(kind.model_fields)


def test_every_test_that_the_documents_name_exists() -> None:
    named = {name for path in PAGES for name in re.findall(r"`(test_\w+)`", path.read_text())}
    defined = {
        name for path in (ROOT / "tests").rglob("test_*.py") for name in re.findall(r"def (test_\w+)", path.read_text())
    }
    assert named
    assert named <= defined


def test_the_sum_that_is_shown_is_that_of_the_defaults() -> None:
    timing = Timing(90)
    assert f"= {timing.spent:.3f} s" in page("docs/safety.md")
    assert f"= {timing.available:.3f} s" in page("docs/safety.md")
