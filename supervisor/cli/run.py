"""`gpuward run`."""

import gc
from pathlib import Path

from supervisor.cli.exits import load_or_exit


def run_node(path: Path) -> int:
    """Loads the configuration and lives as this node's supervisor; the exit code."""
    config = load_or_exit(path)
    gc.disable()  # imports leave no garbage: looking for it takes a tenth of their time, and services wait
    from supervisor.daemon import main  # once the configuration is known to be good: it imports the whole node

    gc.freeze()
    gc.enable()
    return main(config)
