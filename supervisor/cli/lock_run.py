"""`gpuward lock run`: take a lock, then become the command. By exec: no wrapper process stays that a signal could hit.

Imports nothing that is not needed for the case at hand (the whole of it is on the way of every turn on a GPU).
"""

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from supervisor.keeper.job import Denied

USAGE = """usage: gpuward lock run [--gpu N | --path FILE] [--run-dir DIR] -- COMMAND [ARGUMENT...]

Takes the mutex of a GPU and becomes COMMAND; the lock is held until the last process that inherited it has ended.
There is no waiting: when it cannot be had, exit 75 at once, with one JSON line on stderr that says why and who has it.

  --gpu N        the GPU's mutex on this node, by its index (default 0). Only while this node has the authority; COMMAND
                 and all that it starts end with that authority
  --path FILE    a lock file, made if missing (0640); needs no daemon and is not fenced. FILE may be the lock file of a
                 GPU: then this is --gpu
  --run-dir DIR  where the keeper answers; default $GPUWARD_RUN_DIR, else /run/gpuward

exit codes: 75 busy, or no authority on this node · 77 not allowed: see `group` in the configuration ·
64 wrong usage · 73 the lock file cannot be used · 126, 127 COMMAND cannot be executed, is not found ·
else what COMMAND gives"""

_USAGE_ERROR = 64  # sysexits.h: EX_USAGE
_CANNOT_CREATE = 73  # EX_CANTCREAT
_BUSY = 75  # EX_TEMPFAIL
_NOT_ALLOWED = 77  # EX_NOPERM: trying later does not help
_NOT_EXECUTABLE = 126  # sh(1)
_NOT_FOUND = 127
_CODES = {"busy": _BUSY, "no-authority": _BUSY, "not-allowed": _NOT_ALLOWED}


class _Usage(Exception):  # noqa: N818
    pass


def main(argv: list[str]) -> int:
    """Never returns when the command could be executed; else the exit code (see USAGE)."""
    try:
        options, command = _parse(argv)
    except _Usage as error:
        if not error.args:
            print(USAGE)
            return 0
        print(f"gpuward lock run: {error}\n{USAGE}", file=sys.stderr)
        return _USAGE_ERROR
    run = options.get("--run-dir") or os.environ.get("GPUWARD_RUN_DIR") or "/run/gpuward"
    path = options.get("--path")
    gpu = int(options.get("--gpu", "0"))
    if path is not None:
        known = _configured(run, path)
        if known is None:
            return _run_by_path(path, command)
        gpu = known
    return _run_by_gpu(run, gpu, command)


def _parse(argv: list[str]) -> tuple[dict[str, str], list[str]]:
    options: dict[str, str] = {}
    rest = list(argv)
    while rest and rest[0].startswith("-") and rest[0] != "--":
        name, equals, value = rest.pop(0).partition("=")
        if name in ("-h", "--help"):
            raise _Usage
        if name not in ("--gpu", "--path", "--run-dir"):
            hint = "; no configuration is read here: name the run folder with --run-dir" if name == "--config" else ""
            raise _Usage(f"unknown option {name}{hint}")
        if not equals:
            if not rest:
                raise _Usage(f"{name} needs a value")
            value = rest.pop(0)
        if not value:
            raise _Usage(f"{name} needs a value")
        options[name] = value
    if rest[:1] == ["--"]:
        rest.pop(0)
    if "--gpu" in options and "--path" in options:
        raise _Usage("--gpu and --path exclude each other")
    if not options.get("--gpu", "0").isdecimal():
        raise _Usage(f"--gpu: expected an index such as 0, got {options['--gpu']!r}")
    if not rest:
        raise _Usage("a command is missing")
    return options, rest


def _configured(run: str, path: str) -> int | None:
    """The GPU whose lock file this is, by the run folder's list, whatever name or link leads to it."""
    for gpu, entry in (_listed(run) or {}).items():
        if _same(path, entry["path"]):
            return int(gpu)
    return None


def _listed(run: str) -> dict[str, dict[str, str]] | None:
    """The run folder's list of GPUs and lock files; None: there is none, or it cannot be read."""
    from supervisor.keeper.protocol import LOCKS_FILE

    try:
        with open(f"{run}/{LOCKS_FILE}", "rb") as file:
            content = file.read()
    except OSError:
        return None
    import json

    try:
        return {gpu: {"path": entry["path"]} for gpu, entry in json.loads(content).items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        print(f"gpuward lock run: {run}/{LOCKS_FILE} cannot be read: {error!r}", file=sys.stderr)
        return None


def _same(path: str, other: str) -> bool:
    if os.path.realpath(path) == os.path.realpath(other):
        return True
    try:
        return os.path.samefile(path, other)
    except OSError:
        return False


def _run_by_path(path: str, command: list[str]) -> int:
    from supervisor.flock import MutexBusy, take_path

    try:
        fd = take_path(path)
    except MutexBusy as busy:
        who = busy.holders[0] if busy.holders else None
        holder = {
            "service": None,
            "pid": None if who is None else who.pid,
            "since": None,
            "token": None,
            "command": None if who is None else who.command,
        }
        return _denied({"reason": "busy", "holder": holder, "path": path})
    except OSError as error:
        print(f"gpuward lock run: {path}: {error}", file=sys.stderr)
        return _CANNOT_CREATE
    print(f"gpuward lock run: {path} is not fenced: it does not end with this node's authority", file=sys.stderr)
    return _become(fd, command)


def _run_by_gpu(run: str, gpu: int, command: list[str]) -> int:
    from supervisor.keeper.job import Denied, enter

    try:
        entry = enter(run, gpu, "exec", os.path.basename(command[0]))
    except Denied as refused:
        denied = _explained(refused, run, gpu)
        _denied({"reason": denied.reason, "gpu": gpu, "holder": denied.holder, "message": str(denied)})
        return _CODES.get(denied.reason, _USAGE_ERROR)
    entry.close_connection()
    return _become(entry.fd, command)


def _explained(denied: "Denied", run: str, gpu: int) -> "Denied":
    """With the cause, where the keeper itself did not tell it."""
    from supervisor.keeper.job import Denied
    from supervisor.keeper.protocol import JOB_SOCKET

    path, cause = f"{run}/{JOB_SOCKET}", denied.__context__
    if isinstance(cause, PermissionError):
        why = f"uid {os.geteuid()} may not use {path}: be root or a member of `group` in the node's configuration"
        return Denied("not-allowed", why)
    locks = _listed(run) if denied.reason in ("no-authority", "no-such-gpu") else None
    if locks is not None and str(gpu) not in locks:
        return Denied(
            "no-such-gpu", f"GPU {gpu} is not configured on this node, which has GPU {', '.join(locks) or 'none'}"
        )
    if isinstance(cause, FileNotFoundError | ConnectionRefusedError):
        advice = "start `gpuward run`, or name its run folder with --run-dir (no configuration is read here)"
        return Denied("no-authority", f"no keeper answers at {path}: {cause.strerror}; {advice}")
    return denied


def _denied(answer: dict[str, object]) -> int:
    print(_json(answer), file=sys.stderr)
    return _BUSY


def _json(value: object) -> str:
    """One line of JSON. Not by the json package: its import alone takes 10 ms, and busy is what callers hit most."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_json(str(key))}: {_json(item)}" for key, item in value.items()) + "}"
    if value is None or isinstance(value, int | float):
        return "null" if value is None else str(value)
    plain = (c if c.isascii() and c.isprintable() and c not in '"\\' else _escaped(c) for c in str(value))
    return '"' + "".join(plain) + '"'


def _escaped(character: str) -> str:
    units = character.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[i]:02x}{units[i + 1]:02x}" for i in range(0, len(units), 2))


def _become(fd: int, command: list[str]) -> int:
    """Exec, with the lock's fd inherited on purpose."""
    os.set_inheritable(fd, True)
    sys.stderr.flush()
    try:
        os.execvp(command[0], command)
    except FileNotFoundError as error:
        print(f"gpuward lock run: {command[0]}: {error.strerror}", file=sys.stderr)
        return _NOT_FOUND
    except (OSError, ValueError) as error:
        print(f"gpuward lock run: {command[0]}: {error}", file=sys.stderr)
        return _NOT_EXECUTABLE
