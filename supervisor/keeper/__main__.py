"""Entry point of the keeper: run as a file with `python -I -S`, so nothing but the standard library is in reach.

The folder that holds the `supervisor` package is appended, after the standard library's: it may be site-packages.
"""

import os
import sys

sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from supervisor.keeper.main import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
