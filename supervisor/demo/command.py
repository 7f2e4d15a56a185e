"""`gpuward demo`: three supervisors on this machine, a fault, and what an observer saw of it."""

import asyncio
import json
import os
import signal
import sys

from election.clock import boot_time, boot_time_loop
from election.store import StoreError
from election.timing import Timing, TimingError
from supervisor.demo import faults, report, view
from supervisor.demo.cluster import SERVICES, DemoCluster
from supervisor.demo.etcd_cluster import EtcdClusterError
from supervisor.demo.fault import SETTLE, Fault, FaultError, Stage
from supervisor.demo.node_faults import NoFault
from supervisor.demo.view import Plain
from supervisor.demo.watch import Event, Watcher, running_services

STORES = ("local", "etcd")
FORMATS = ("text", "json")
USAGE_ERROR = 2
START_LIMIT = 20.0
"""Seconds, besides two TTLs, until all services run somewhere. A cold start takes one TTL: nothing is known of an
earlier term, so the first claim has to wait for it."""
NEXT = "next: another --fault, or one node to try: README.md has the commands"
"""After a good result, for people."""
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class DemoError(Exception):
    """The demo cannot be run, or did not come up; the text says why."""


def run_demo(store: str, fault: str, seconds: float, ttl: int, fmt: str) -> int:
    """Run a demo of `seconds`, counted from when all services first run. Exit status: 0 ok, 1 not ok, 2 wrong use,
    128 + n after signal n. With `fmt` json the last line of stdout is the result as one JSON object."""
    try:
        kind = _checked(store, fault, seconds, ttl, fmt)
    except DemoError as error:
        print(f"gpuward demo: {error}", file=sys.stderr)
        return USAGE_ERROR
    with asyncio.Runner(loop_factory=boot_time_loop) as runner:
        return runner.run(_until_signal(store, kind, seconds, ttl, fmt))


def _checked(store: str, fault: str, seconds: float, ttl: int, fmt: str) -> Fault:
    if store not in STORES:
        raise DemoError(f"--store {store}: expected one of {', '.join(STORES)}")
    if fmt not in FORMATS:
        raise DemoError(f"--format {fmt}: expected one of {', '.join(FORMATS)}")
    if fault not in faults.NAMES:
        raise DemoError(f"--fault {fault}: expected one of {', '.join(faults.NAMES)}")
    try:
        Timing(ttl)
    except TimingError as error:
        raise DemoError(f"--ttl: {error}") from None
    kind = faults.make(fault)
    if not kind.available(store):
        raise DemoError(f"--fault {fault} needs --store {' or '.join(kind.stores)}")
    if kind.needs_root and os.geteuid() != 0:
        raise DemoError(f"--fault {fault} needs root: it works on cgroups or mounts")
    if seconds < kind.needs(ttl):
        raise DemoError(
            f"--for {seconds:g}s is too short: {fault} with a TTL of {ttl} s takes {kind.needs(ttl):g} s to show"
        )
    return kind


async def _until_signal(store: str, fault: Fault, seconds: float, ttl: int, fmt: str) -> int:
    """A signal ends the demo like an error does: everything is cleaned up first."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    caught: list[int] = []

    def stop(signum: int) -> None:
        caught.append(signum)
        task.cancel()

    for signum in STOPPING:
        loop.add_signal_handler(signum, stop, signum)
    try:
        return await _demo(store, fault, seconds, ttl, fmt)
    except asyncio.CancelledError:
        if not caught:
            raise
        return 128 + caught[0]
    except (DemoError, EtcdClusterError, OSError) as error:
        print(f"gpuward demo: {error}", file=sys.stderr)
        return 1


async def _demo(store: str, fault: Fault, seconds: float, ttl: int, fmt: str) -> int:
    screen = view.for_output(fmt, f"gpuward demo: store {store}, fault {fault.name}, TTL {ttl} s")
    with DemoCluster(store, ttl, small_disks=fault.small_disks, own_clocks=fault.own_clocks) as cluster:
        screen.notice(
            Event(boot_time(), f"three nodes started in {cluster.folder}, containment: {cluster.containment}")
        )
        screen.notice(Event(boot_time(), f"a cold start waits one TTL ({ttl} s): nothing is known of an earlier term"))
        async with Watcher(cluster, screen.notice) as watcher, screen.live(watcher):
            await _first_start(watcher, 2 * ttl + START_LIMIT)
            trouble = await _play(fault, watcher, screen, boot_time() + seconds)
            seen = await _measure(fault, watcher, trouble)
    result = report.summarize(seen)
    if fmt == "json":
        print(json.dumps(result), flush=True)
    else:
        text = [*screen.untold(), *report.lines(result, fault.proves, fault.takeovers)]
        text += [NEXT] if result["ok"] else []
        print("\n".join(text), flush=True)
    return 0 if result["ok"] else 1


async def _first_start(watcher: Watcher, limit: float) -> None:
    def ended() -> list[str]:
        return [name for name, node in watcher.cluster.nodes.items() if not node.running]

    await watcher.until(lambda: bool(watcher.complete() or ended()), boot_time() + limit)
    if watcher.complete() is None:
        late = f"no node had all services running after {limit:g} s"
        what = f"the supervisor of {', '.join(ended())} ended" if ended() else late
        raise DemoError(f"{what}\n{_last_words(watcher)}")


async def _play(fault: Fault, watcher: Watcher, screen: Plain, until: float) -> str | None:
    """Inject, mend when the take-over is through, watch until the end. What went wrong, if anything did."""
    await asyncio.sleep(SETTLE)
    holder = watcher.complete()
    if holder is None:
        return f"no node had all services running {SETTLE:g} s after the start"
    stage = Stage(watcher.cluster, watcher, holder)
    if isinstance(fault, NoFault):
        await _sleep_until(until)
        return None
    trouble = None
    screen.notice(Event(boot_time(), f"fault {fault.name} on {holder}"))
    terms = len(watcher.terms)
    try:
        await fault.inject(stage)
        await _until_mendable(fault, watcher, terms, until)
    except (FaultError, StoreError, OSError) as error:
        trouble = f"fault {fault.name}: {error}"
    finally:
        await fault.heal(stage)
    left = f"; for {until - boot_time():.0f} s more it is watched what comes of it" if boot_time() < until else ""
    screen.notice(Event(boot_time(), f"fault {fault.name} is over{left}"))
    await _sleep_until(until)
    return trouble or fault.unproven(stage)


async def _until_mendable(fault: Fault, watcher: Watcher, terms: int, until: float) -> None:
    lasts = fault.lasts(watcher.cluster.ttl)
    if lasts is not None:
        await asyncio.sleep(lasts)
        return
    wanted = terms + fault.takeovers
    await watcher.until(lambda: len(watcher.terms) >= wanted and watcher.complete() is not None, until)


async def _measure(fault: Fault, watcher: Watcher, trouble: str | None) -> report.Seen:
    complete = watcher.complete()
    leading = watcher.statuses[watcher.active() or next(iter(watcher.statuses))]
    observed = await watcher.finish_observer()
    return report.Seen(
        fault=fault.name,
        takeovers_expected=fault.takeovers,
        store=watcher.cluster.store,
        ttl=watcher.cluster.ttl,
        containment=watcher.cluster.containment,
        services_expected=SERVICES,
        terms=watcher.terms,
        works=watcher.works,
        observer=observed,
        running=running_services(leading),
        complete=complete,
        trouble=trouble,
    )


async def _sleep_until(deadline: float) -> None:
    await asyncio.sleep(max(0.0, deadline - boot_time()))


def _last_words(watcher: Watcher) -> str:
    """The end of each supervisor's log, since all folders are about to go."""
    text: list[str] = []
    for name, node in watcher.cluster.nodes.items():
        text.append(f"{name}: {(watcher.statuses[name] or {}).get('why', 'no answer')}")
        text += [f"  {line}" for line in node.last_lines()]
    return "\n".join(text)
