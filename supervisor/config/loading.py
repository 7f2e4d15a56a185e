"""Reads a configuration from its files, and says everything that is wrong with it at once."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from supervisor.config.advice import warnings
from supervisor.config.after import wrong_after
from supervisor.config.document import Document, Where, dotted, read, sample
from supervisor.config.problems import ConfigErrors, Problem, described
from supervisor.config.schema import MOST_GPUS, Config, Reach

__all__ = ["ConfigErrors", "Problem", "load", "load_reach", "warnings"]

ANOTHER = "name another with --config"
FOLDER = "services.d"
"""Beside the main file; every *.yml in it adds services."""
SECRET = re.compile(r"pass|secret|token|credential|auth|(^|[-_])key|^env|^(command|args|options)$", re.IGNORECASE)
"""Names of keys whose values no message shows. Commands have secrets among their options."""
KINDS = {
    "string_type": "a text",
    "int_type": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "greater_than_equal": "{ge} or more",
    "less_than_equal": "{le} or less",
    "less_than": "less than {lt}",
    "literal_error": "{expected}",
    "too_short": "at least one",
    "too_long": "fewer",
}
"""What is expected, by pydantic's type of error."""


@dataclass(frozen=True)
class _Merged:
    """The main file and the services of the folder beside it, as one."""

    main: Document
    services: dict[str, Document]
    """The file that a service stands in."""

    def file_of(self, where: Where) -> Document:
        if len(where) > 1 and where[0] == "services":
            return self.services.get(str(where[1]), self.main)
        return self.main

    def line_of(self, where: Where) -> int:
        return self.file_of(where).line(where)


def load(path: Path) -> Config:
    """The configuration in `path` and in `services.d/*.yml` beside it.

    Raises `ConfigErrors` with every problem at once: of files, of values, and of values that do not go together.
    """
    main = read(path, "; ".join(filter(None, (ANOTHER, sample()))))
    if main.data is None:
        raise ConfigErrors(main.problems)
    problems = main.problems
    if not isinstance(main.data, dict):
        main.wrong(1, (), described(main.data), "a mapping")
        raise ConfigErrors(problems)
    merged = _merge(main, path.parent / FOLDER, problems)
    config = None
    try:
        config = Config.model_validate(main.data)
    except ValidationError as error:
        problems += [_translated(merged, details) for details in error.errors(include_url=False)]
    problems += _missing_gpus(merged) + _wrong_after(merged)
    if problems or config is None:
        files = list(dict.fromkeys([main.file, *(problem.file for problem in problems)]))
        raise ConfigErrors(sorted(problems, key=lambda problem: (files.index(problem.file), problem.line or 0)))
    return config


def load_reach(path: Path) -> Reach:
    """`paths` and `api` of the file, and nothing else: who only asks the daemon need not be able to run it.

    Raises `ConfigErrors` with what is wrong there, or where the file is none at all.
    """
    main = read(path, f"{ANOTHER}, or the run folder with --run-dir")
    if main.data is None:
        raise ConfigErrors(main.problems)
    if not isinstance(main.data, dict):
        main.wrong(1, (), described(main.data), "a mapping")
        raise ConfigErrors(main.problems)
    problems = [problem for problem in main.problems if problem.path.partition(".")[0] in Reach.model_fields]
    reach = None
    try:
        reach = Reach.model_validate(main.data)
    except ValidationError as error:
        problems += [_translated(_Merged(main, {}), details) for details in error.errors(include_url=False)]
    if problems or reach is None:
        raise ConfigErrors(problems)
    return reach


def _merge(main: Document, folder: Path, problems: list[Problem]) -> _Merged:
    """Puts the folder's services into the main file's data."""
    services = main.data.get("services")
    if not isinstance(services, dict):
        if services is not None:  # `services:` with nothing below it means none
            main.wrong(main.line(("services",)), ("services",), _kind(services), "a mapping")
        services = main.data["services"] = {}
    _as_written(services, main)
    merged = _Merged(main, dict.fromkeys(services, main))
    for path in _files(folder, problems):
        part = read(path)
        found = _services_of(part)
        _as_written(found, part)
        for name, service in found.items():
            where = ("services", name)
            if name in merged.services:
                first = merged.services[name]
                also = f"also in {first.file}:{first.line(where)}"
                part.wrong(part.line(where), where, "the service twice", "each service once", also)
            else:
                services[name] = service
                merged.services[name] = part
        problems += part.problems
    return merged


def _files(folder: Path, problems: list[Problem]) -> list[Path]:
    try:
        paths = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except FileNotFoundError:
        return []
    except OSError as error:
        problems.append(
            Problem(str(folder), None, "", f"no readable folder ({error.strerror})", "a folder of *.yml files")
        )
        return []
    for path in paths:
        if path.suffix == ".yaml":
            problems.append(Problem(str(path), None, "", "a name with .yaml", "a name with .yml, or it is not read"))
    return [path for path in paths if path.suffix == ".yml"]


def _services_of(part: Document) -> dict[str, Any]:
    if part.data is None:
        return {}
    if not isinstance(part.data, dict):
        part.wrong(1, (), described(part.data), "a mapping with `services:`")
        return {}
    for key in part.data:
        if key != "services":
            part.wrong(part.line((key,)), (key,), "a key that does not belong here", "only `services:` in this folder")
    services = part.data.get("services") or {}
    if not isinstance(services, dict):
        part.wrong(part.line(("services",)), ("services",), described(services), "a mapping of services")
        return {}
    return services


def _as_written(services: dict[str, Any], document: Document) -> None:
    """Words of commands and values of variables are texts: `[sleep, 60]` and `PORT: 080` mean what is written."""
    for name, service in services.items():
        for where, values in _word_lists(service):
            _texts(("services", name, *where), values, document)


def _word_lists(service: Any) -> Iterator[tuple[Where, Any]]:
    """Where in a service, or a sidecar, texts are listed."""
    if not isinstance(service, dict):
        return
    for section in ("command", "env"):
        yield (section,), service.get(section)
    for part, keys in (("container", ("args", "options")), ("readiness", ("command",)), ("liveness", ("command",))):
        if isinstance(found := service.get(part), dict):
            yield from (((part, key), found.get(key)) for key in keys)
    sidecars = service.get("sidecars")
    for name, sidecar in sidecars.items() if isinstance(sidecars, dict) else ():
        yield from ((("sidecars", name, *where), values) for where, values in _word_lists(sidecar))


def _texts(where: Where, values: Any, document: Document) -> None:
    keys = range(len(values)) if isinstance(values, list) else list(values) if isinstance(values, dict) else []
    for key in keys:
        if isinstance(values[key], bool | int | float):
            values[key] = document.source[*where, key]


def _translated(merged: _Merged, details: ErrorDetails) -> Problem:
    """A problem in our words from an error in pydantic's."""
    kind, context = details["type"], details.get("ctx", {})
    where: Where = tuple(part for part in details["loc"] if part != "[key]")
    document, line = merged.file_of(where), merged.line_of(where)
    if kind == "missing":
        return Problem(document.file, line, dotted(where), "nothing", "this key", "it is required")
    if kind == "extra_forbidden":
        known = _known(where[:-1])
        close = get_close_matches(str(where[-1]), known, 1)
        hint = f"did you mean {close[0]}?" if close else f"known here: {', '.join(known)}"
        return Problem(document.file, line, dotted(where), "an unknown key", "a known one", hint)
    if kind == "gpuward":
        expected, found, hint = context["expected"], context["found"], context["hint"]
    else:
        expected, found, hint = KINDS.get(kind, details["msg"]).format_map(context), "", ""
    value = details["input"]
    if isinstance(value, bool) and (word := document.source.get(where)) and word.lower() not in ("true", "false"):
        hint = (
            hint or f'YAML reads the word {word} as {described(value)}; write "{word}" in quotes if you mean the word'
        )
    elif isinstance(value, int | float) and kind == "string_type":
        hint = hint or "write it in quotes"
    return Problem(document.file, line, dotted(where), found or _shown(where, value, kind), expected, hint)


def _shown(where: Where, value: object, kind: str) -> str:
    """The value, unless it could be a secret."""
    if kind in ("model_type", "dict_type", "tuple_type"):
        return _kind(value)
    names = where[2:] if where[:1] == ("services",) else where
    hidden = any(isinstance(name, str) and SECRET.search(name) for name in names)
    return "a value that is not shown" if hidden and value is not None else described(value)


def _kind(value: object) -> str:
    return "a text" if isinstance(value, str) else described(value)


def _known(section: Where) -> list[str]:
    """The keys that the section may have."""
    kind: Any = Config
    for part in section:
        if get_origin(kind) is dict:  # by names
            kind = get_args(kind)[1]
        else:
            kind = kind.model_fields[part].annotation
            if get_origin(kind) is not dict:
                kind = next((arg for arg in get_args(kind) if hasattr(arg, "model_fields")), kind)
    return list(kind.model_fields)


def _missing_gpus(merged: _Merged) -> list[Problem]:
    """Services on a GPU that the node has not; also where other values are wrong."""
    gpu = merged.main.data.get("gpu")
    simulated = gpu.get("simulated", {}) if isinstance(gpu, dict) else None
    count = simulated.get("count", 1) if isinstance(simulated, dict) else None
    services = merged.main.data["services"]
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= MOST_GPUS:
        return []
    problems = []
    for name, service in services.items() if isinstance(services, dict) else ():
        index = service.get("gpu") if isinstance(service, dict) else None
        if isinstance(index, int) and not isinstance(index, bool) and index >= count:
            where = ("services", name, "gpu")
            place = merged.file_of(where).file, merged.line_of(where)
            problems.append(
                Problem(*place, dotted(where), str(index), f"0 to {count - 1}", f"gpu.simulated.count is {count}")
            )
    return problems


def _wrong_after(merged: _Merged) -> list[Problem]:
    services = merged.main.data["services"]
    problems = []
    for name, found, expected in wrong_after(services) if isinstance(services, dict) else ():
        where = ("services", name, "after")
        place = merged.file_of(where).file, merged.line_of(where)
        problems.append(Problem(*place, dotted(where), found, expected))
    return problems
