"""The `gpuward` command. `gpuward lock run` must not pay for the whole command line: it is answered before."""

import sys


def main() -> int:
    """Run the command in sys.argv; the exit code."""
    if sys.argv[1:3] == ["lock", "run"]:
        from supervisor.cli.lock_run import main as lock_run

        return lock_run(sys.argv[3:])
    from supervisor.cli.app import app

    app()
    return 0


if __name__ == "__main__":
    sys.exit(main())
