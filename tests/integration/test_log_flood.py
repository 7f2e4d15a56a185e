"""A service that floods its log with lines of 200 KB in Latin-1, through a whole node."""

import signal
import subprocess
import sys

from tests.bed.keeper import PATIENCE
from tests.bed.nodes import Make

LINES = 250
LINE = b"\xe9\xfc\xdf" * 66_664
FLOOD = f"""
import os, time
while not os.path.exists("go"):
    time.sleep(0.02)
for number in range({LINES}):
    line = b"%06d " % number + b"\\xe9\\xfc\\xdf" * 66664 + b"\\n"
    while line:
        line = line[os.write(1, line):]
open("done", "w").close()
time.sleep(1000)
"""


def test_50_mb_of_latin_1_in_lines_of_200_kb_block_nobody_rotate_and_are_read_within_bounds(make_node: Make) -> None:
    """Supervisor 638, 1554; ipython 14005. All of it is written while the supervisor stands still, so nothing of it can
    pass through the supervisor; then it is rotated, whole, and its last lines are answered within the bounds."""
    node = make_node(ttl=60).after_an_orderly_end()
    command = (sys.executable, "-I", "-S", "-c", FLOOD)
    node.add_service("chatty", *command, cwd=str(node.folder), log={"max_size": "5MB", "keep": 20})
    pid = node.start().until_leading()["services"][0]["pid"]
    node.signal(signal.SIGSTOP)
    try:
        (node.folder / "go").touch()
        node.until((node.folder / "done").exists, within=25)
    finally:
        node.signal(signal.SIGCONT)
    log = node.folder / "log" / "chatty.log"
    node.until(lambda: log.with_name("chatty.log.1").exists() and log.stat().st_size <= 1 << 20, within=30)
    pieces = sorted(log.parent.glob("chatty.log.*"), key=lambda path: -int(path.suffix[1:]))
    written = b"".join(path.read_bytes() for path in [*pieces, log]).replace(b"\0", b"")
    assert written == b"".join(b"%06d " % number + LINE + b"\n" for number in range(LINES))

    shown = subprocess.run(
        [
            sys.executable,
            "-m",
            "supervisor.entry",
            "service",
            "logs",
            "chatty",
            "-n",
            "512",
            "--run-dir",
            str(node.run),
        ],
        capture_output=True,
        check=True,
        timeout=PATIENCE,
    ).stdout.decode()
    lines = shown.splitlines()
    assert [line[:7] for line in lines[-2:]] == ["000248 ", "000249 "]
    assert 5 <= len(lines) <= 15  # of the last 2 MiB
    assert set(lines[-1][7:]) == {"\N{REPLACEMENT CHARACTER}"}
    status = node.until_leading()
    assert (status["services"][0]["pid"], status["services"][0]["failures"]) == (pid, 0)
