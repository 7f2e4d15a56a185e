"""The commands of `gpuward` and their options. What a command needs is imported inside it: `--help` stays quick.

`gpuward lock run` is answered before this module is imported, see supervisor/entry.py; it is named here for the help.
"""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

DEFAULT_CONFIG = Path("/etc/gpuward/gpuward.yml")

app = typer.Typer(
    name="gpuward",
    help="One GPU node active, never two: supervises GPU services, with an etcd lease as cross-node lock.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
lock_app = typer.Typer(help="The lock of a GPU on this node.", no_args_is_help=True)
app.add_typer(lock_app, name="lock")

ConfigFile = Annotated[
    Path, typer.Option("--config", "-c", envvar="GPUWARD_CONFIG", metavar="FILE", help="The configuration.")
]


class TextFormat(StrEnum):
    TEXT = "text"
    JSON = "json"


class TableFormat(StrEnum):
    TABLE = "table"
    JSON = "json"


class Store(StrEnum):
    LOCAL = "local"
    ETCD = "etcd"


@app.command()
def run(config: ConfigFile = DEFAULT_CONFIG) -> None:
    """Be this node's supervisor, in the foreground. Exit 78 on a wrong configuration, with nothing started."""
    from supervisor.cli.run import run_node

    raise typer.Exit(run_node(config))


@app.command("check-config")
def check_config(
    config: ConfigFile = DEFAULT_CONFIG,
    output: Annotated[TextFormat, typer.Option("--format", help="How to print.")] = TextFormat.TEXT,
) -> None:
    """Read the configuration; show every problem, the times that follow from the TTL, services and warnings."""
    from supervisor.cli.check import check

    raise typer.Exit(check(config, as_json=output is TextFormat.JSON))


@app.command()
def status(
    config: ConfigFile = DEFAULT_CONFIG,
    url: Annotated[str | None, typer.Option("--url", help="Ask this node instead of the configured one.")] = None,
    output: Annotated[TableFormat, typer.Option("--format", help="How to print.")] = TableFormat.TABLE,
) -> None:
    """Who leads, and how this node, its GPUs and its services are. Exit 69 if no daemon answers."""
    from supervisor.cli.status import show

    raise typer.Exit(show(config, url, as_json=output is TableFormat.JSON))


@app.command()
def demo(
    store: Annotated[Store, typer.Option(help="local needs nothing; etcd starts three members.")] = Store.LOCAL,
    fault: Annotated[
        str, typer.Option(metavar="NAME", help="What to break; a wrong name lists them all.")
    ] = "kill-node",
    duration: Annotated[str, typer.Option("--for", metavar="TIME", help="How long, as in 40s or 2m.")] = "40s",
    ttl: Annotated[int, typer.Option(metavar="SECONDS", help="The lease; 90 for the real thing.")] = 9,
    output: Annotated[
        TextFormat, typer.Option("--format", help="json: the last line is the result.")
    ] = TextFormat.TEXT,
) -> None:
    """Three supervisors with simulated GPUs and eight services on this machine, a fault, and a take-over."""
    from pydantic_core import PydanticCustomError

    from supervisor.config.values import duration as seconds_of

    try:
        seconds = seconds_of(float(duration) if duration.replace(".", "", 1).isdecimal() else duration)
    except PydanticCustomError as error:
        raise typer.BadParameter(f"found {duration!r}, {error.message()}", param_hint="--for") from None
    from supervisor.demo.command import run_demo

    raise typer.Exit(run_demo(store.value, fault, seconds, ttl, output.value))


@app.command()
def version() -> None:
    """Print the version."""
    from importlib.metadata import version as installed

    print(f"gpuward {installed('gpuward')}")


@lock_app.command("run", context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
def lock_run(context: typer.Context) -> None:
    """[--gpu N | --path FILE] -- COMMAND: take the lock and become COMMAND. Exit 75 at once if it is busy."""
    from supervisor.cli.lock_run import main

    raise typer.Exit(main(context.args))


@lock_app.command("list")
def lock_list(
    config: ConfigFile = DEFAULT_CONFIG,
    output: Annotated[TableFormat, typer.Option("--format", help="How to print.")] = TableFormat.TABLE,
) -> None:
    """Who has the lock of each GPU of this node, for how long, and who waits. Exit 69 if no daemon answers."""
    from supervisor.cli.lock import show

    raise typer.Exit(show(config, as_json=output is TableFormat.JSON))
