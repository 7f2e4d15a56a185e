"""Run benchmarks and write docs/benchmarks.md: machine, load, and each figure with the command that made it.

    python -m benchmarks.run [NAME...]

With names only those are run, and the other sections stay as they are; `faults` takes about an hour by itself.
A benchmark is a module beside this one with a `main`: its docstring begins with one sentence on what it measures, and
it prints Markdown on stdout.
"""

import ast
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

from supervisor.demo.etcd_cluster import EtcdClusterError, find_binaries

HERE = Path(__file__).parent
RESULT = HERE.parent / "docs/benchmarks.md"
INTRODUCTION = """# Benchmarks

Written by `python -m benchmarks.run` (`make bench`): medians and p99 as measured once on the machine below, not limits
of a test. Times that hang on process starts grow with the load of the machine.
"""


def machine() -> list[str]:
    """What the figures were made on, a line each."""
    return [
        f"- CPU: {os.cpu_count()} × {_field('/proc/cpuinfo', 'model name')}",
        f"- memory: {int(_field('/proc/meminfo', 'MemTotal').split()[0]) / 2**20:.1f} GiB",
        f"- kernel {platform.release()}, Python {platform.python_version()}, etcd {_etcd_version()}",
    ]


def benchmarks() -> list[str]:
    """Names of the modules beside this one that can be run."""
    return sorted(p.stem for p in HERE.glob("*.py") if p != Path(__file__) and "__main__" in p.read_text())


def section(name: str) -> str:
    """Run one benchmark; raises CalledProcessError where it fails."""
    command = ["python", "-m", f"benchmarks.{name}"]
    load = " ".join(f"{load:.2f}" for load in os.getloadavg())
    print(f"== {' '.join(command)}", file=sys.stderr, flush=True)
    done = subprocess.run(
        [sys.executable, *command[1:]], cwd=HERE.parent, stdout=subprocess.PIPE, check=True, text=True
    )
    first = (ast.get_docstring(ast.parse((HERE / f"{name}.py").read_text())) or name).split("\n\n")[0]
    title = " ".join(first.split())
    when = f"`{' '.join(command)}`, {datetime.now(UTC):%Y-%m-%d}, load before it {load}"
    return f"## {name}\n\n{title}\n\n{when}\n\n{done.stdout.strip()}\n"


def written() -> dict[str, str]:
    """The sections of the last report, by name."""
    text = RESULT.read_text() if RESULT.exists() else ""
    return {part.split("\n", 1)[0]: f"## {part.rstrip()}\n" for part in text.split("\n## ")[1:]}


def main() -> None:
    wanted = sys.argv[1:] or benchmarks()
    if unknown := set(wanted) - set(benchmarks()):
        sys.exit(f"no benchmark {', '.join(unknown)}; there are: {', '.join(benchmarks())}")
    sections = written() | {name: section(name) for name in wanted}
    parts = [INTRODUCTION, "\n".join(machine()) + "\n", *(sections[name] for name in sorted(sections))]
    RESULT.write_text("\n".join(parts))
    print(f"written: {RESULT}", file=sys.stderr)


def _field(file: str, name: str) -> str:
    for line in Path(file).read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return "unknown"


def _etcd_version() -> str:
    try:
        command = [str(find_binaries() / "etcd"), "--version"]
    except EtcdClusterError:
        return "not installed"
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[2]


if __name__ == "__main__":
    main()
