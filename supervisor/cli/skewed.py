"""A supervisor of the demo whose wall clock can be set: `python -m supervisor.cli.skewed CONFIG OFFSET`."""

import sys
from pathlib import Path

from supervisor.cli.exits import load_or_exit
from supervisor.daemon import main
from supervisor.demo.skewed import SkewedClock

if __name__ == "__main__":
    sys.exit(main(load_or_exit(Path(sys.argv[1])), SkewedClock(Path(sys.argv[2]))))
