"""A YAML file as plain data, with the line of every key and value.

What YAML 1.1 would silently turn into something else stays text here (1:30, 010, dates); its words for true and false
(yes, no, on, off) are read as such, and `Document.source` has what was written, so that a message can explain it.
"""

import os
import re
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from supervisor.config.problems import Problem, described

TAG = "tag:yaml.org,2002:"
MAX_BYTES = 256 * 1024
"""Of one file. Eight services need 4 KiB; PyYAML reads some 100 KiB a second."""
MAX_VALUES = 50_000
"""Values in one file, aliases expanded: some bytes of nested aliases can stand for any number of them."""
MAX_DEPTH = 40
TRUE_WORDS = {"yes": True, "true": True, "on": True, "no": False, "false": False, "off": False}

SAMPLE = Path(__file__).parents[2] / "examples/gpuward.yml"
"""Only in a checkout: a wheel has no examples."""

Where = tuple[str | int, ...]
"""Keys and list indexes from the top of the file to a value."""


@dataclass
class Document:
    """One file that was read: as much of it as could be understood, and what could not."""

    file: str
    data: Any = None
    lines: dict[Where, int] = field(default_factory=dict)
    source: dict[Where, str] = field(default_factory=dict)
    """Scalars as they were written, without quotes."""
    problems: list[Problem] = field(default_factory=list)

    def line(self, where: Where) -> int:
        """Of the value, or of the nearest that is around it."""
        while where and where not in self.lines:
            where = where[:-1]
        return self.lines.get(where, 1)

    def wrong(self, line: int | None, where: Where, found: str, expected: str, hint: str = "") -> None:
        """Notes a problem."""
        self.problems.append(Problem(self.file, line, dotted(where), found, expected, hint))


def dotted(where: Where) -> str:
    """`services.trainer.command.0`, on one line and of printable characters whatever the keys are."""
    return ".".join(text if (text := str(part)).isprintable() else ascii(text)[1:-1] for part in where)


def read(path: Path, instead: str = "") -> Document:
    """The file's content. Never raises for what is in it: see `problems`. `instead`: the advice where there is none."""
    document = Document(str(path))
    text = _text(path, document, instead)
    if text is None:
        return document
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        _syntax(document, text, error)
    except RecursionError:
        document.wrong(None, (), "lists or mappings nested too deep", f"at most {MAX_DEPTH} levels")
    else:
        if node is None:
            document.wrong(None, (), "an empty file", "a mapping", sample())
        else:
            walk = _Walk(document)
            data = walk.value(node, (), 0)
            document.data = None if walk.overflow else data
            if data is None and not document.problems:
                document.wrong(1, (), "nothing", "a mapping")
    return document


def sample() -> str:
    """Where every key is explained, for a message; empty where that is not on this machine."""
    return f"{SAMPLE} explains every key" if SAMPLE.is_file() else ""


def _text(path: Path, document: Document, instead: str) -> str | None:
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                document.wrong(None, (), "something that is not a regular file", "a YAML file")
                return None
            raw = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the path
        found = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        document.wrong(None, (), f"no readable file ({found})", "a YAML file", instead)
        return None
    if len(raw) > MAX_BYTES:
        document.wrong(None, (), f"more than {MAX_BYTES} bytes", "a smaller file")
        return None
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        document.wrong(line, (), f"byte 0x{raw[error.start]:02x}, which is not UTF-8", "a text in UTF-8")
        return None


def _syntax(document: Document, text: str, error: yaml.YAMLError) -> None:
    """A message without the text around the place: that may be a secret."""
    if isinstance(error, yaml.reader.ReaderError):
        line = text[: error.position].count("\n") + 1
        document.wrong(line, (), f"the control character {error.character!r}", "printable text")
        return
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    trouble = str(getattr(error, "problem", None) or "what is not YAML")
    hint = ""
    if "'\\t'" in trouble:
        hint = "indent with spaces: YAML allows no tabs there"
    elif "mapping values are not allowed" in trouble:
        hint = "quote a text that contains ': ', and check the indentation"
    elif "but found another document" in trouble:
        trouble, hint = "a second document", "one document a file: remove the ---"
    found = re.sub(r"^(but )?found ", "", trouble)
    document.wrong(mark.line + 1 if mark else None, (), f"a YAML error: {found}", "valid YAML", hint)


class _Walk:
    """Turns nodes into data, noting lines and problems in the document."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self.left = MAX_VALUES
        self.overflow = False

    def value(self, node: yaml.Node, where: Where, depth: int) -> Any:
        line = node.start_mark.line + 1
        self.document.lines.setdefault(where, line)
        self.left -= 1
        if self.left < 0 or depth > MAX_DEPTH:
            if not self.overflow:
                limit = f"at most {MAX_VALUES} values in at most {MAX_DEPTH} levels"
                self.document.wrong(line, (), "more values or deeper nesting than that", limit)
            self.overflow = True
            return None
        if isinstance(node, yaml.MappingNode) and node.tag == TAG + "map":
            return self.mapping(node, where, depth)
        if isinstance(node, yaml.SequenceNode) and node.tag == TAG + "seq":
            return [self.value(child, (*where, index), depth + 1) for index, child in enumerate(node.value)]
        if isinstance(node, yaml.ScalarNode) and node.tag.removeprefix(TAG) in PLAIN:
            self.document.lines[where] = line
            self.document.source[where] = node.value
            return scalar(node)
        self.document.wrong(line, where, "a YAML tag", "a value without one", "tags such as !vault are not read")
        return None

    def mapping(self, node: yaml.MappingNode, where: Where, depth: int) -> dict[str, Any]:
        result: dict[str, Any] = {}
        own: dict[str, int] = {}
        merged: list[yaml.Node] = []
        for key_node, value_node in node.value:
            if key_node.tag == TAG + "merge":
                merged += value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]
                continue
            key = self.key(key_node, where)
            if key is None:
                continue
            line = key_node.start_mark.line + 1
            if key in own:
                self.document.wrong(line, (*where, key), "the key twice", "each key once", f"also in line {own[key]}")
                continue
            own[key] = line
            self.document.lines[*where, key] = line
            result[key] = self.value(value_node, (*where, key), depth + 1)
        for source in merged:
            self.merge(source, result, where, depth)
        return result

    def merge(self, node: yaml.Node, result: dict[str, Any], where: Where, depth: int) -> None:
        """What `<<: *anchor` brings: keys that are not there already."""
        if not isinstance(node, yaml.MappingNode):
            self.document.wrong(node.start_mark.line + 1, where, "a << of something else", "<<: of a mapping")
            return
        shadow = _Walk(Document(self.document.file))
        shadow.left = self.left
        data = shadow.value(node, where, depth + 1)
        self.left = shadow.left
        self.overflow |= shadow.overflow
        for key, value in (data or {}).items():
            if key not in result:
                result[key] = value
        for place, line in shadow.document.lines.items():
            self.document.lines.setdefault(place, line)
        for place, text in shadow.document.source.items():
            self.document.source.setdefault(place, text)
        self.document.problems += shadow.document.problems

    def key(self, node: yaml.Node, where: Where) -> str | None:
        line = node.start_mark.line + 1
        if isinstance(node, yaml.ScalarNode) and node.tag.removeprefix(TAG) in PLAIN:
            key = scalar(node)
            if isinstance(key, str):
                return key
            word = described(node.value)
            hint = f'YAML reads it as {described(key)}; write "{node.value}"' if node.value.isalnum() else ""
            self.document.wrong(line, where, f"the key {word}, which is not a text", "a text as key", hint)
        else:
            self.document.wrong(line, where, "a list, mapping or tag as key", "a text as key")
        return None


PLAIN = frozenset({"str", "null", "bool", "int", "float", "timestamp", "value", "merge"})
"""Tags of scalars that YAML chooses by itself."""


def scalar(node: yaml.ScalarNode) -> str | int | float | bool | None:
    """A scalar's value: numbers in plain decimal only, so that 010 and 1:30 stay what was written."""
    kind, text = node.tag.removeprefix(TAG), str(node.value)
    if kind == "null":
        return None
    if kind == "bool":
        return TRUE_WORDS.get(text.lower(), text)
    quoted = node.style in ("'", '"', "|", ">")
    if not quoted and len(text) <= 30 and kind in ("int", "float", "str"):
        if re.fullmatch(r"[-+]?(0|[1-9][0-9]*)", text):
            return int(text)
        if re.fullmatch(r"[-+]?[0-9]+(\.[0-9]*)?([eE][-+]?[0-9]{1,3})?", text) and re.search(r"[.eE]", text):
            return float(text)
    return text
