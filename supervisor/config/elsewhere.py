"""Commands whose processes would live outside the service's cgroup, where gpuward can neither watch nor end them.

Told only where it is certain: by the program, behind wrappers such as `env` and `sudo`, and in the script of `sh -c` by
the first word of a command: a container anywhere, a unit where it is the script's last command. What a script does by
variables, functions or other files is not looked at.
"""

import itertools
import re
import shlex
from collections.abc import Sequence

_DOCKER = "the container would run below dockerd"
_PODMAN = "the container would run in a cgroup of its own"
_SYSTEMD = "the unit would run below systemd"
_PROGRAMS = {
    "docker": _DOCKER,
    "docker-compose": _DOCKER,
    "nerdctl": "the container would run below containerd",
    "ctr": "the container would run below containerd",
    "podman": _PODMAN,
    "podman-compose": _PODMAN,
    "systemctl": _SYSTEMD,
    "systemd-run": _SYSTEMD,
}
_CONTAINERS = frozenset({"docker", "docker-compose", "nerdctl", "ctr", "podman", "podman-compose"})
_STARTS = frozenset({"run", "start", "restart", "create", "up", "play", "kube", "exec"})
"""What makes a process elsewhere, among the first words after the program: a script may well `docker rm` something."""
_SHELLS = frozenset({"sh", "bash", "dash", "ash", "ksh", "zsh", "busybox"})
_WRAPPERS = frozenset(
    {"env", "sudo", "nice", "ionice", "nohup", "setsid", "stdbuf", "timeout", "chrt", "exec", "command"}
)
_KEYWORDS = frozenset({"if", "then", "else", "elif", "while", "until", "do", "!", "{", "(", "time"})
_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=.*", re.DOTALL)
_MOST_WORDS = 1000


def lives_elsewhere(command: Sequence[str]) -> tuple[str, str] | None:
    """(program, why it is refused and what to write instead); None: nothing certain can be said against it."""
    program = _name(command[0])
    if program in _PROGRAMS:
        return program, _advice(program)
    words = _unwrapped(command)
    found = _started(words)
    if found is None and words and _name(words[0]) in _SHELLS:
        found = _in_script(_commands(_script(words)))
    return None if found is None else (found, _advice(found))


def _in_script(commands: Sequence[Sequence[str]]) -> str | None:
    for number, words in enumerate(commands, 1):
        found = _started(_unwrapped(words))
        if found is not None and (found in _CONTAINERS or number == len(commands)):
            return found
    return None


def _advice(program: str) -> str:
    instead = "use `container:` in place of `command`" if program in _CONTAINERS else "name the program itself"
    return f"{_PROGRAMS[program]}, where gpuward can neither watch nor end it; {instead}"


def _name(word: str) -> str:
    return word.rpartition("/")[2]


def _started(words: Sequence[str]) -> str | None:
    """The program, if these words start something elsewhere."""
    program = _name(words[0]) if words else ""
    if program not in _PROGRAMS:
        return None
    return program if program == "systemd-run" or _STARTS & set(words[1:4]) else None


def _unwrapped(words: Sequence[str]) -> Sequence[str]:
    """Without assignments, keywords, and `env`, `sudo`, … with their own options before the program."""
    position = 0
    while position < len(words):
        word = words[position]
        if _ASSIGNMENT.fullmatch(word) or word in _KEYWORDS:
            position += 1
        elif _name(word) in _WRAPPERS:
            position += 1
            while position < len(words) and re.match(r"-|[0-9]", words[position]):
                position += 1
        else:
            break
    return words[position:]


def _script(words: Sequence[str]) -> str:
    """What a shell is given with -c (or -ec, -lc, …)."""
    for option, script in itertools.pairwise(words[1:]):
        if re.fullmatch(r"-[a-z]*c", option):
            return script
        if not option.startswith("-") and option not in _SHELLS:
            break
    return ""


def _commands(script: str) -> list[list[str]]:
    """The simple commands of a script; none where its quotes do not add up."""
    lexer = shlex.shlex(script.replace("\\\n", " ").replace("\n", " ; "), posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    found: list[list[str]] = [[]]
    try:
        for _, word in zip(range(_MOST_WORDS), lexer, strict=False):
            if set(word) <= set(";&|()"):
                found.append([])
            else:
                found[-1].append(word)
    except ValueError:
        return []
    return [words for words in found if words]
