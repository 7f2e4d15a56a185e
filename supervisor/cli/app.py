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
service_app = typer.Typer(help="The services of this node, one by one.", no_args_is_help=True)
app.add_typer(service_app, name="service")

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


RunDir = Annotated[
    Path | None, typer.Option("--run-dir", metavar="DIR", help="Where the daemon's socket is; default: paths.run.")
]
AskIn = Annotated[
    Path | None, typer.Option("--run-dir", metavar="DIR", help="Ask through the daemon's socket there; no --config.")
]


def _print_version(wanted: bool) -> None:
    if wanted:
        version()
        raise typer.Exit


@app.callback()
def gpuward(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


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
    run_dir: AskIn = None,
    output: Annotated[TableFormat, typer.Option("--format", help="How to print.")] = TableFormat.TABLE,
) -> None:
    """Who leads, and how this node, its GPUs and its services are. Exit 69 if no daemon answers."""
    if url is not None and run_dir is not None:
        raise typer.BadParameter("--url and --run-dir exclude each other", param_hint="--run-dir")
    from supervisor.cli.status import show

    raise typer.Exit(show(config, url, run_dir, as_json=output is TableFormat.JSON))


@app.command()
def demo(
    store: Annotated[Store, typer.Option(help="local needs nothing; etcd starts three members.")] = Store.LOCAL,
    fault: Annotated[
        str, typer.Option(metavar="NAME", help="What to break; a wrong name lists them all.")
    ] = "kill-node",
    duration: Annotated[
        str, typer.Option("--for", metavar="TIME", help="How long once all services run, as in 40s or 2m.")
    ] = "40s",
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


ServiceName = Annotated[str, typer.Argument(metavar="NAME", help="A service of this node.")]
Format = Annotated[TableFormat, typer.Option("--format", help="How to print.")]
Wait = Annotated[bool, typer.Option("--wait", help="Return when it is done.")]
WaitLimit = Annotated[float, typer.Option("--timeout", min=0, metavar="SECONDS", help="How long --wait waits.")]


NodeArgument = Annotated[str, typer.Argument(metavar="NODE", help="A node of the cluster, by its name.")]
Because = Annotated[str, typer.Option("--because", metavar="TEXT", help="Why, for whoever looks at it later.")]


@app.command()
def switchover(
    target: NodeArgument,
    config: ConfigFile = DEFAULT_CONFIG,
    run_dir: RunDir = None,
    output: Format = TableFormat.TABLE,
    wait: Wait = False,
    timeout: WaitLimit = 120.0,
) -> None:
    """Pass the lock on to NODE: services end here in good order and start there. Exit 75 if it cannot be done now."""
    from supervisor.cli.cluster import switch_over
    from supervisor.cli.service import find

    as_json = output is TableFormat.JSON
    raise typer.Exit(switch_over(find(config, run_dir), target, wait=timeout if wait else None, as_json=as_json))


@app.command()
def pause(
    config: ConfigFile = DEFAULT_CONFIG,
    run_dir: RunDir = None,
    because: Because = "",
    output: Format = TableFormat.TABLE,
) -> None:
    """No node takes over until `gpuward resume`. Services are left alone, and so are all deadlines."""
    _operators_word("pause", {"because": because}, config, run_dir, output)


@app.command()
def resume(config: ConfigFile = DEFAULT_CONFIG, run_dir: RunDir = None, output: Format = TableFormat.TABLE) -> None:
    """End a pause: fit nodes take over again."""
    _operators_word("resume", None, config, run_dir, output)


@app.command()
def exclude(
    node: NodeArgument,
    config: ConfigFile = DEFAULT_CONFIG,
    run_dir: RunDir = None,
    because: Because = "",
    output: Format = TableFormat.TABLE,
) -> None:
    """NODE does not take over until `gpuward include`. If it leads it goes on: see switchover."""
    _operators_word("exclude", {"node": node, "because": because}, config, run_dir, output)


@app.command()
def include(
    node: NodeArgument, config: ConfigFile = DEFAULT_CONFIG, run_dir: RunDir = None, output: Format = TableFormat.TABLE
) -> None:
    """End an exclusion: NODE may take over again, once it is fit."""
    _operators_word("include", {"node": node}, config, run_dir, output)


@app.command("reset-floor")
def reset_floor(
    config: ConfigFile = DEFAULT_CONFIG,
    yes: Annotated[bool, typer.Option("--yes", help="Do it; without, only say what it risks.")] = False,
) -> None:
    """Forget the highest fencing token seen, after etcd was restored from a backup. Says what that risks."""
    from supervisor.cli.floor import reset

    raise typer.Exit(reset(config, yes=yes))


def _operators_word(
    word: str, body: dict[str, str] | None, config: Path, run_dir: Path | None, output: TableFormat
) -> None:
    from supervisor.cli.cluster import ask
    from supervisor.cli.service import find

    raise typer.Exit(ask(find(config, run_dir), word, body, as_json=output is TableFormat.JSON))


@service_app.command("list")
def service_list(
    config: ConfigFile = DEFAULT_CONFIG, run_dir: RunDir = None, output: Format = TableFormat.TABLE
) -> None:
    """All services with their states."""
    from supervisor.cli.service import find, show_all

    raise typer.Exit(show_all(find(config, run_dir), as_json=output is TableFormat.JSON))


@service_app.command("show")
def service_show(
    name: ServiceName, config: ConfigFile = DEFAULT_CONFIG, run_dir: RunDir = None, output: Format = TableFormat.TABLE
) -> None:
    """One service: state, since when, why, its last lines. Exit 3 if it is not running."""
    from supervisor.cli.service import find, show

    raise typer.Exit(show(find(config, run_dir), name, as_json=output is TableFormat.JSON))


@service_app.command("start")
def service_start(
    name: ServiceName,
    config: ConfigFile = DEFAULT_CONFIG,
    run_dir: RunDir = None,
    output: Format = TableFormat.TABLE,
    wait: Wait = False,
    timeout: WaitLimit = 120.0,
) -> None:
    """Start one that is stopped, degraded or in a pause. Exit 75 if this node may not start it now."""
    _service_command("start", name, config, run_dir, output, timeout if wait else None)


@service_app.command("stop")
def service_stop(
    name: ServiceName,
    config: ConfigFile = DEFAULT_CONFIG,
    run_dir: RunDir = None,
    output: Format = TableFormat.TABLE,
    wait: Wait = False,
    timeout: WaitLimit = 120.0,
) -> None:
    """End it in good order; this node does not start it again by itself. A second stop kills it at once."""
    _service_command("stop", name, config, run_dir, output, timeout if wait else None)


@service_app.command("restart")
def service_restart(
    name: ServiceName,
    config: ConfigFile = DEFAULT_CONFIG,
    run_dir: RunDir = None,
    output: Format = TableFormat.TABLE,
    wait: Wait = False,
    timeout: WaitLimit = 120.0,
) -> None:
    """End it in good order and start it again; not counted as a failure."""
    _service_command("restart", name, config, run_dir, output, timeout if wait else None)


@service_app.command("drain")
def service_drain(
    name: ServiceName,
    config: ConfigFile = DEFAULT_CONFIG,
    run_dir: RunDir = None,
    output: Format = TableFormat.TABLE,
    wait: Wait = False,
    timeout: WaitLimit = 120.0,
) -> None:
    """Send it its drain_signal and let it go on; once it has ended by itself it stays stopped."""
    _service_command("drain", name, config, run_dir, output, timeout if wait else None)


@service_app.command("reset")
def service_reset(
    name: ServiceName, config: ConfigFile = DEFAULT_CONFIG, run_dir: RunDir = None, output: Format = TableFormat.TABLE
) -> None:
    """Forget its failures: a degraded service starts again."""
    _service_command("reset", name, config, run_dir, output, None)


def _service_command(
    verb: str, name: str, config: Path, run_dir: Path | None, output: TableFormat, wait: float | None
) -> None:
    from supervisor.cli.service import command, find

    as_json = output is TableFormat.JSON
    raise typer.Exit(command(find(config, run_dir), name, verb, wait=wait, as_json=as_json))


@service_app.command("logs")
def service_logs(
    name: ServiceName,
    config: ConfigFile = DEFAULT_CONFIG,
    run_dir: RunDir = None,
    lines: Annotated[int, typer.Option("--lines", "-n", min=1, max=512, help="How many, from the end.")] = 20,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what comes, until Ctrl-C.")] = False,
    sidecar: Annotated[str | None, typer.Option("--sidecar", metavar="NAME", help="Of a sidecar of it.")] = None,
    output: Format = TableFormat.TABLE,
) -> None:
    """The end of its log file."""
    if follow and output is TableFormat.JSON:
        raise typer.BadParameter("json is one answer: leave out --follow", param_hint="--format")
    from supervisor.cli.service import find, logs

    as_json = output is TableFormat.JSON
    raise typer.Exit(logs(find(config, run_dir), name, lines, sidecar=sidecar, follow=follow, as_json=as_json))


@lock_app.command("run", context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
def lock_run(context: typer.Context) -> None:
    """[--gpu N | --path FILE] -- COMMAND: take the lock and become COMMAND. Exit 75 at once if it is busy."""
    from supervisor.cli.lock_run import main

    raise typer.Exit(main(context.args))


@lock_app.command("list")
def lock_list(
    config: ConfigFile = DEFAULT_CONFIG,
    run_dir: AskIn = None,
    output: Annotated[TableFormat, typer.Option("--format", help="How to print.")] = TableFormat.TABLE,
) -> None:
    """Who has the lock of each GPU of this node, for how long, and who waits. Exit 69 if no daemon answers."""
    from supervisor.cli.lock import show

    raise typer.Exit(show(config, run_dir, as_json=output is TableFormat.JSON))
