"""What users other than root may ask of a node that root runs, and what they are told where they may not."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.bed.nodes import LONG_TTL, Make, NodeBed

NOBODY = 65534
ADMINS, CALLERS = 54321, 54322
"""Gids that nobody has."""

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="root only: the node has services of another user")


@pytest.fixture
def node(make_node: Make) -> Iterator[NodeBed]:
    """It leads, with a service of another user, in a folder that anybody may search."""
    folder = Path(tempfile.mkdtemp(prefix="gpuward-access-"))
    folder.chmod(0o755)
    made = make_node(folder=str(folder / "n1"), ttl=LONG_TTL).after_an_orderly_end()
    made.config |= {"admin_group": ADMINS, "group": CALLERS}
    made.add_service("other", "sleep", "1000", user=NOBODY)
    try:
        made.start().until_leading()
        yield made
        made.end()
    finally:
        shutil.rmtree(folder)


def as_nobody(group: int, *words: str) -> "subprocess.CompletedProcess[str]":
    """A command of a user who may not run the services; `group` is his only one."""
    command = ["setpriv", f"--reuid={NOBODY}", f"--regid={group}", "--clear-groups", sys.executable]
    if subprocess.run([*command, "-c", "import supervisor.cli.app"], stderr=subprocess.DEVNULL, check=False).returncode:
        pytest.skip("needs a virtual environment that any user may execute")
    command += ["-m", "supervisor.entry", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_a_member_of_the_admin_group_needs_no_right_to_run_the_services_of_others(node: NodeBed) -> None:
    config = ("--config", str(node.folder / "gpuward.yml"))
    for words in (("status",), ("lock", "list"), ("service", "list"), ("service", "restart", "other")):
        done = as_nobody(ADMINS, *words, *config)
        assert (done.returncode, done.stderr) == (0, ""), words
    assert as_nobody(ADMINS, "check-config", *config).returncode == 78


def test_status_and_lock_list_ask_through_the_socket_of_a_run_folder(node: NodeBed) -> None:
    run = ("--run-dir", str(node.run))
    status = as_nobody(ADMINS, "status", *run, "--format", "json")
    assert json.loads(status.stdout)["node"] == "n1"
    assert json.loads(as_nobody(ADMINS, "lock", "list", *run, "--format", "json").stdout)[0]["gpu"] == 0
    stranger = as_nobody(NOBODY, "status", *run)
    assert (stranger.returncode, "`admin_group`" in stranger.stderr) == (77, True)


def test_a_caller_outside_the_group_is_told_which_group_and_not_to_try_later(node: NodeBed) -> None:
    words = ("lock", "run", "--run-dir", str(node.run), "--", "true")
    assert as_nobody(CALLERS, *words).returncode == 0
    refused = as_nobody(NOBODY, *words)
    said = json.loads(refused.stderr)
    assert (refused.returncode, said["reason"], said["holder"]) == (77, "not-allowed", None)
    assert f"uid {NOBODY} may not use {node.run}/keeper.sock" in said["message"]
    assert "`group`" in said["message"]
