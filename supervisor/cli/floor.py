"""`gpuward reset-floor`: the way out where etcd was restored from a backup without a bump of its revision (rule 21)."""

import fcntl
import os
import time
from pathlib import Path

from supervisor.cli.exits import NOT_NOW, fail, load_or_exit
from supervisor.files import parse_json, read_at_most, rename_new

LOCK = "supervisor.lock"
"""In the state folder, flocked by a living supervisor: see supervisor.run_folder."""
USAGE = 64
CANNOT = 74
"""EX_IOERR of sysexits.h."""
LARGEST = 4096
"""Bytes read of the file."""
RISK = """\
By {path} this node has seen fencing token {token}, and it claims nothing in a store below that. Forgetting it lets
tokens be given out a second time: whatever checks them, say a storage that refuses an older one, may take an old holder
for the new one. A snapshot that is restored with a bumped revision needs none of this (docs/election.md, rule 21).
Before you go on: stop gpuward on all nodes, and see that no GPU service runs on any of them."""


def reset(config: Path, *, yes: bool) -> int:
    """Sets the file with the highest token aside. Exits with 64 without `yes`, 74 if that fails, 75 while a supervisor
    runs."""
    state = load_or_exit(config).paths.state
    path = state / "floor.json"
    try:
        token = parse_json(read_at_most(path, LARGEST))["token"]
    except FileNotFoundError:
        print(f"there is no {path}: nothing is remembered")
        return 0
    except (OSError, ValueError, KeyError, TypeError) as error:
        token = f"(unreadable: {error})"
    print(RISK.format(path=path, token=token))
    if not yes:
        fail("nothing was changed; --yes does it", USAGE)
    lock = os.open(state / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        fail(f"a supervisor runs with {state}: stop it first", NOT_NOW)
    aside = path.with_name(f"{path.name}.reset-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}")
    try:
        rename_new(path, aside)
    except OSError as error:
        fail(f"nothing was changed: {path} could not be renamed to {aside}: {error.strerror}", CANNOT)
    print(f"forgotten; the old file is {aside}")
    return 0
