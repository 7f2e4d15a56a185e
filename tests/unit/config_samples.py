"""Configurations for the tests: a small valid one, and how to load a changed one."""

import os
from pathlib import Path

from supervisor.config.loading import load
from supervisor.config.problems import ConfigErrors, Problem
from supervisor.config.schema import Config

SMALL = f"""\
cluster: prod
node: gpu1
election:
  store: local
gpu:
  driver: simulated
services:
  trainer:
    command: [sleep, 60]
    user: {os.geteuid()}
    gpu: 0
    lock: lifetime
"""


def write(folder: Path, text: str, name: str = "gpuward.yml") -> Path:
    """The text as a file."""
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


def loaded(folder: Path, text: str) -> Config:
    return load(write(folder, text))


def problems(folder: Path, text: str) -> list[Problem]:
    """What is wrong with the text; fails where nothing is."""
    try:
        config = loaded(folder, text)
    except ConfigErrors as errors:
        return errors.problems
    raise AssertionError(f"it loaded: {config}")


def one_problem(folder: Path, text: str) -> Problem:
    found = problems(folder, text)
    assert len(found) == 1, found
    return found[0]
