"""A file system that can be frozen: a process that writes into it then stands in D state, and SIGKILL waits."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def freezable(tmp_path: Path) -> Iterator[Path]:
    """An ext4 on a loop device; always thawed and unmounted."""
    tools = [name for name in ("mkfs.ext4", "losetup", "fsfreeze", "mount") if shutil.which(name) is None]
    if os.geteuid() != 0 or tools:
        pytest.skip(f"needs root and {', '.join(tools) or 'its tools'}")
    image, mounted = tmp_path / "image", tmp_path / "mounted"
    mounted.mkdir()
    with image.open("wb") as file:
        file.truncate(16 << 20)
    subprocess.run(["mkfs.ext4", "-q", image], check=True, capture_output=True)
    if subprocess.run(["mount", "-o", "loop", image, mounted], check=False, capture_output=True).returncode:
        pytest.skip("needs loop devices that can be mounted")
    try:
        yield mounted
    finally:
        subprocess.run(["fsfreeze", "-u", mounted], check=False, capture_output=True)
        subprocess.run(["umount", mounted], check=True, capture_output=True)


def fsfreeze(how: str, folder: Path) -> None:
    """`-f` freezes, `-u` thaws."""
    subprocess.run(["fsfreeze", how, folder], check=True)
