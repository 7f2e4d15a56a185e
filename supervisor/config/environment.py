"""The `env_file` of a service: KEY=VALUE lines."""

import re
from pathlib import Path

MAX_BYTES = 256 * 1024
"""A larger file is the wrong file."""


class EnvironmentFileError(Exception):
    """The file cannot be used; the message has its name and line, and nothing of what is in it."""


def read_env_file(path: Path) -> dict[str, str]:
    """The variables of a file.

    Empty lines and lines that begin with # do not count. One pair of quotes around a value is taken off; nothing is
    expanded; of two lines with one name the later counts. Raises `EnvironmentFileError`.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
        text = raw.decode()
    except OSError as error:
        raise EnvironmentFileError(f"env_file {path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise EnvironmentFileError(f"env_file {path}: is not UTF-8") from None
    if len(raw) > MAX_BYTES:
        raise EnvironmentFileError(f"env_file {path}: is larger than {MAX_BYTES} bytes")
    variables = {}
    for number, line in enumerate(text.split("\n"), start=1):
        stripped = line.strip()
        if not stripped or stripped.startswith("#"):
            continue
        match = re.fullmatch(r"([A-Za-z_][A-Za-z0-9_]*)=([^\0]*)", stripped)
        if match is None:
            raise EnvironmentFileError(f"env_file {path}:{number}: found another kind of line, expected KEY=VALUE")
        variables[match[1]] = _unquoted(match[2])
    return variables


def _unquoted(value: str) -> str:
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"" else value
