import os
from pathlib import Path

import pytest

from supervisor.config.loading import load
from supervisor.config.problems import ConfigErrors
from tests.unit.config_samples import SMALL, loaded, one_problem, problems, write

ONE_MORE = f"services:\n  second:\n    command: [sleep, 60]\n    user: {os.geteuid()}\n"


def test_every_error_is_told_at_once_with_file_line_and_path(tmp_path: Path) -> None:
    text = SMALL.replace("prod", "PROD").replace("store: local", "store: x").replace("gpu: 0", "gpu: 7")
    text = text.replace("command:", "comand:")
    found = [str(problem) for problem in problems(tmp_path, text)]
    file = tmp_path / "gpuward.yml"
    assert found == [
        f"{file}:1: cluster: found 'PROD', expected 1 to 63 of a-z, 0-9 and -",
        f"{file}:4: election.store: found 'x', expected 'etcd' or 'local'",
        f"{file}:8: services.trainer.command: found nothing, expected this key "
        "(it is required, unless there is a `container`)",
        f"{file}:9: services.trainer.comand: found an unknown key, expected a known one (did you mean command?)",
        f"{file}:11: services.trainer.gpu: found 7, expected 0 to 0 (gpu.simulated.count is 1)",
    ]


@pytest.mark.parametrize("section", ["", "readiness", "liveness", "restart", "log", "sidecars.proxy"])
def test_an_unknown_key_in_any_section_of_a_service_is_told_with_the_one_that_was_meant(
    tmp_path: Path, section: str
) -> None:
    nested = {
        "readiness": "{notify: true, timout: 1m}",
        "liveness": "{tcp: '127.0.0.1:1', timout: 1s}",
        "restart": "{windo: 5m}",
        "log": "{kep: 3}",
        "sidecars.proxy": "{proxy: {command: [sleep, 60], usr: root}}",
    }
    text = SMALL + (f"    {section.partition('.')[0]}: {nested[section]}\n" if section else "    ster_timeout: 5s\n")
    problem = one_problem(tmp_path, text)
    assert (problem.line, problem.found) == (13, "an unknown key")
    assert problem.path.startswith(".".join(filter(None, ["services.trainer", section])) + ".")
    assert problem.hint.startswith("did you mean ")


def test_an_unknown_key_of_a_sidecars_readiness_is_told_with_the_one_that_was_meant(tmp_path: Path) -> None:
    text = SMALL + "    sidecars: {proxy: {command: [sleep, 60], readiness: {notfy: true, notify: true}}}\n"
    problem = one_problem(tmp_path, text)
    assert problem.path == "services.trainer.sidecars.proxy.readiness.notfy"
    assert problem.hint == "did you mean notify?"


def test_a_key_with_a_line_break_is_told_on_one_line(tmp_path: Path) -> None:
    problem = one_problem(tmp_path, SMALL + '"a\\nb": 1\n')
    assert problem.path == "a\\nb"


def test_services_come_from_the_folder_beside_the_file_too(tmp_path: Path) -> None:
    write(tmp_path / "services.d", ONE_MORE, "more.yml")
    write(tmp_path / "services.d", "not: [read", ".hidden.yml")
    write(tmp_path / "services.d", "not: [read", "notes.txt")
    assert list(loaded(tmp_path, SMALL).services) == ["trainer", "second"]


def test_an_error_in_a_file_of_the_folder_names_that_file_and_its_line(tmp_path: Path) -> None:
    part = write(tmp_path / "services.d", ONE_MORE + "    gpu: 3\n    lock: lifetime\n", "more.yml")
    problem = one_problem(tmp_path, SMALL)
    assert (problem.file, problem.line, problem.path) == (str(part), 5, "services.second.gpu")


def test_a_service_declared_twice_names_both_places(tmp_path: Path) -> None:
    part = write(tmp_path / "services.d", ONE_MORE.replace("second", "trainer"), "more.yml")
    problem = one_problem(tmp_path, SMALL)
    assert (problem.file, problem.line) == (str(part), 2)
    assert problem.hint == f"also in {tmp_path}/gpuward.yml:8"


def test_a_folder_file_may_hold_services_only(tmp_path: Path) -> None:
    write(tmp_path / "services.d", ONE_MORE + "cluster: other\n", "more.yml")
    assert one_problem(tmp_path, SMALL).path == "cluster"


def test_a_file_that_would_be_left_out_by_its_ending_is_an_error(tmp_path: Path) -> None:
    write(tmp_path / "services.d", ONE_MORE, "more.yaml")
    assert one_problem(tmp_path, SMALL).file.endswith("more.yaml")


def test_broken_yaml_in_one_file_does_not_hide_errors_of_another(tmp_path: Path) -> None:
    write(tmp_path / "services.d", "services: [", "broken.yml")
    assert {problem.path for problem in problems(tmp_path, SMALL.replace("prod", "PROD"))} == {"", "cluster"}


def test_a_key_written_twice_is_an_error(tmp_path: Path) -> None:
    problem = one_problem(tmp_path, SMALL + "    gpu: 0\n")
    assert (problem.path, problem.line, problem.hint) == ("services.trainer.gpu", 13, "also in line 11")


@pytest.mark.parametrize("word", ["no", "on", "Yes", "OFF"])
def test_words_that_yaml_reads_as_true_or_false_are_explained(tmp_path: Path, word: str) -> None:
    problem = one_problem(tmp_path, SMALL.replace("node: gpu1", f"node: {word}"))
    assert problem.line == 2
    assert f"YAML reads the word {word} as" in problem.hint
    key = one_problem(tmp_path, SMALL.replace("trainer:", f"{word}:"))
    assert f'write "{word}"' in key.hint


def test_numbers_among_words_of_a_command_and_variables_mean_what_is_written(tmp_path: Path) -> None:
    text = SMALL.replace("[sleep, 60]", "[x, 60, 080, 1.50, yes, 1:30, 2026-01-01]") + "    env: {A: 0755, B: on}\n"
    service = loaded(tmp_path, text).services["trainer"]
    assert service.command == ("x", "60", "080", "1.50", "yes", "1:30", "2026-01-01")
    assert service.env == {"A": "0755", "B": "on"}


def test_anchors_and_merge_keys_work(tmp_path: Path) -> None:
    text = SMALL.replace("trainer:", "trainer: &base") + "  second:\n    <<: *base\n    lock: on-demand\n"
    config = loaded(tmp_path, text)
    assert config.services["second"].command == ("sleep", "60")
    assert config.services["second"].lock == "on-demand"
    assert config.services["trainer"].lock == "lifetime"


@pytest.mark.parametrize(
    ("content", "line", "found"),
    [
        (b"", None, "an empty file"),
        (b"# nothing\n", None, "an empty file"),
        (b"- a\n", 1, "a list"),
        (b"just text\n", 1, "'just text'"),
        (b"cluster: prod\n\tnode: x\n", 2, "\\t"),
        (b"cluster: 'prod\n", 2, "end of stream"),
        (b"cluster: prod\nnode: caf\xe9\n", 2, "0xe9, which is not UTF-8"),
        (b"cluster: a\x00b\n", 1, "control character"),
        (b"cluster: a: b\n", 1, "mapping values are not allowed"),
        (b"cluster: *nowhere\n", 1, "undefined alias"),
        (b"cluster: a\n---\ncluster: b\n", 2, "a second document"),
        (b"a: &a [*a]\n", 1, "deeper nesting"),
        (b"[" * 5000, None, "nested too deep"),
        (b"#" * 300_000, None, "more than 262144 bytes"),
    ],
)
def test_a_file_that_is_no_configuration_is_one_problem_with_its_line(
    tmp_path: Path, content: bytes, line: int | None, found: str
) -> None:
    path = tmp_path / "gpuward.yml"
    path.write_bytes(content)
    with pytest.raises(ConfigErrors) as errors:
        load(path)
    assert [problem.line for problem in errors.value.problems] == [line]
    assert found in errors.value.problems[0].found


def test_aliases_that_stand_for_a_billion_values_are_refused(tmp_path: Path) -> None:
    text = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12))
    assert "50000 values" in one_problem(tmp_path, text).expected


def test_a_tag_is_refused(tmp_path: Path) -> None:
    found = problems(tmp_path, SMALL.replace("prod", "!vault prod"))
    assert found[0].found == "a YAML tag"


@pytest.mark.parametrize("path", ["/nowhere/gpuward.yml", "/", "/dev/null", "/dev/zero"])
def test_what_cannot_be_read_is_one_problem(path: str) -> None:
    with pytest.raises(ConfigErrors) as errors:
        load(Path(path))
    assert len(errors.value.problems) == 1


def test_a_fifo_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "gpuward.yml")
    with pytest.raises(ConfigErrors, match="not a regular file"):
        load(tmp_path / "gpuward.yml")


SECRET = "hunter2"


@pytest.mark.parametrize(
    "text",
    [
        SMALL + f"    env: {{TOKEN: [{SECRET}]}}\n",
        SMALL + f"    env: [TOKEN={SECRET}]\n",
        SMALL + f"    env: TOKEN={SECRET}\n",
        SMALL + f"    env: {{TOKEN={SECRET}: x}}\n",
        SMALL + f"    env_file: TOKEN={SECRET}\n",
        SMALL + f'    env: {{TOKEN: "{SECRET}\\0"}}\n',
        SMALL + f"    env: {{TOKEN: '{SECRET}}}\n",
        SMALL + f"    password: {SECRET}\n",
        SMALL + f"api_token: {SECRET}\n",
        SMALL.replace("[sleep, 60]", f"curl --user me:{SECRET}"),
        SMALL.replace("[sleep, 60]", f"[docker, run, {SECRET}]"),
        SMALL.replace("[sleep, 60]", f'[x, "{SECRET}\\0"]'),
        SMALL.replace("store: local", f"store: etcd\n  etcd: {{endpoints: ['http://root:{SECRET}@h:2379']}}"),
        SMALL.replace("store: local", f"store: etcd\n  etcd: {{endpoints: 'http://root:{SECRET}@h:2379'}}"),
        SMALL + f"url: http://root:{SECRET}@h\n",
        SMALL + f"  second: x --token={SECRET}\n",
    ],
)
def test_no_message_shows_a_secret(tmp_path: Path, text: str) -> None:
    assert SECRET in text
    assert SECRET not in "\n".join(str(problem) for problem in problems(tmp_path, text))
