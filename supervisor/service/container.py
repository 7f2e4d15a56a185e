"""A service that is a container: how it is started below our cgroup, and what is done about an earlier one.

The runtime's client is the service's first process, started by the keeper in the service's cgroup, with the service's
log as its output. It is asked for a container

- below that cgroup: with Docker by --cgroup-parent; podman's own processes stand there anyhow (--cgroups=split);
- that starts only while the service's gate is there (supervisor.keeper.places): an engine may be late by minutes;
- that no engine ever starts again by itself: no restart policy;
- whose name is `gpuward-NAME`: an engine has it once. What an earlier run left under that name is removed first, if its
  labels say that it is ours; a stranger's is left alone, and named.

Where it stands is then read from /proc, whatever the engine says. The variables of the service go into a file (0600)
that is removed as soon as the container runs: nothing of them stands in arguments, nor in the environment of the
client, which runs as root.
"""

import asyncio
import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from election.clock import Clock
from supervisor import proc
from supervisor.cgroup import mount_point
from supervisor.config import engines
from supervisor.config.accounts import Account
from supervisor.config.service import Container
from supervisor.files import write_atomically
from supervisor.gpu.aside import Aside
from supervisor.gpu.driver import GpuFacts
from supervisor.keeper.places import GATE
from supervisor.keeper.protocol import LOOK, NOTIFY_FOLDER, SIDECAR
from supervisor.service.footprint import Footprint

FOLDER = "containers"
"""In the run folder: files with variables."""
PREPARE_LIMIT = 15.0
"""Seconds for the engine to tell of itself and to remove an earlier container."""
START_LIMIT = 30.0
"""Seconds from the start of the client until its container runs; without a pull it takes less than 2."""
_LOOK_EVERY = 0.05
"""Seconds between looks at our own cgroup."""
_ASK_EVERY = 1.0
"""Seconds between questions to an engine whose container is not to be seen in our cgroup."""
_LAST_WAIT = 1.0
"""Seconds for a client that was killed to be gone."""
_GATE_INSIDE = "/run/gpuward-gate"
"""Where a container sees its gate, which is of no use to it."""
_FAILED_TO_START = range(125, 128)
"""Exit codes of a client whose container did not come to run (docker-run(1), podman-run(1), Exit Status)."""
_TAIL = 4096
"""Bytes of the log that are searched for what the client said."""


class ContainerError(Exception):
    """It cannot be started, or does not stand where it must; the text says why."""


class OutsideError(ContainerError):
    """It ran outside the service's cgroup."""


@dataclass(frozen=True)
class Place:
    """Where a container is started, and as whose."""

    name: str
    node: str
    run: Path
    parent: str
    """The node's fenced parent, below the cgroup2 mount."""
    token: int
    account: Account
    gpu: GpuFacts | None

    @property
    def cgroup(self) -> str:
        """Of the service in this term (supervisor.keeper.places)."""
        return f"{self.parent.rstrip('/')}/term-{self.token}/{self.name}"

    @property
    def labels(self) -> dict[str, str]:
        """By which a later run of this node knows the container as its own."""
        return own_labels(self.name, self.node, self.run)


def container_name(service: str) -> str:
    """The only one of this name that an engine can have."""
    return f"gpuward-{service}"


def own_labels(service: str, node: str, run: Path) -> dict[str, str]:
    """A node is told by its run folder too: of two nodes on one machine no two have the same."""
    return {"gpuward.service": service, "gpuward.node": node, "gpuward.run": str(run)}


def env_file(run: Path, service: str) -> Path:
    """Where its variables stand until it runs."""
    return run / FOLDER / f"{service}.env"


def write_env_file(file: Path, env: Mapping[str, str]) -> None:
    """NAME=value a line: neither runtime knows quotes there. Blocks. Raises ContainerError, OSError."""
    for name, value in env.items():
        if "\n" in value or "\r" in value:
            raise ContainerError(f"the value of {name} has more than one line, which a container cannot be given")
    file.parent.mkdir(mode=0o700, exist_ok=True)
    text = "".join(f"{name}={value}\n" for name, value in env.items())
    write_atomically(file, text.encode(), durable=False)


def run_words(container: Container, place: Place, cwd: Path | None) -> list[str]:
    """The client's command. Holds no value of the service's environment."""
    notify = place.run / NOTIFY_FOLDER
    account = place.account
    words = ["run", f"--name={container_name(place.name)}", "--rm", "--restart=no", "--pull=never", "--log-driver=none"]
    words += [f"--label={key}={value}" for key, value in (place.labels | {"gpuward.token": str(place.token)}).items()]
    words += [f"--user={account.uid}:{account.gid}"]
    words += [f"--group-add={group}" for group in account.groups if group != account.gid]
    words += [f"--env-file={env_file(place.run, place.name)}"]
    words += [] if cwd is None else [f"--workdir={cwd}"]
    words += [_mount(notify, str(notify))]
    if container.runtime == "docker":
        words += [f"--cgroup-parent={place.cgroup}", _mount(f"{mount_point()}{place.cgroup}/{GATE}", _GATE_INSIDE)]
    else:
        words += ["--cgroups=split", "--sdnotify=ignore"]
    words += [] if place.gpu is None else _gpu_words(container, place.gpu)
    return [*words, *container.options, container.image, *container.args]


def _mount(source: object, target: str, mode: str = ",readonly") -> str:
    return f"--mount=type=bind,source={source},target={target}{mode}"


def _gpu_words(container: Container, gpu: GpuFacts) -> list[str]:
    """By UUID: an index means another GPU after a reboot. A simulated GPU is a file, seen at the same path inside."""
    if gpu.device.parent != Path("/dev"):
        return [_mount(gpu.device, str(gpu.device), "")]
    if container.runtime == "docker":
        return [f"--gpus=device={gpu.uuid}"]
    return [f"--device=nvidia.com/gpu={gpu.uuid}"]  # CDI: `nvidia-ctk cdi generate` names GPUs by UUID too


def is_ours(found: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Does what the engine tells of a container say that this node started it for this service?"""
    has = (found.get("Config") or {}).get("Labels") or {}
    return labels.items() <= has.items()


def is_below(path: str | None, cgroup: str) -> bool:
    """Does a process that /proc shows in `path` stand in this cgroup or below?"""
    return path is not None and (path == cgroup or path.startswith(f"{cgroup}/"))


def inner(footprint: Footprint) -> list[int]:
    """Processes of the service without its client and what stands with it, its sidecars, looks and jobs: what runs
    in the container."""
    own = proc.cgroup_path(footprint.pid)
    return [
        pid
        for pid in footprint.pids()
        if pid != footprint.pid and (path := proc.cgroup_path(pid)) != own and not _is_beside(path, footprint)
    ]


def _is_beside(path: str | None, footprint: Footprint) -> bool:
    own = f"{footprint.cgroup}/"
    return path is not None and path.startswith(own) and path[len(own) :].startswith((SIDECAR, LOOK, "job-"))


def signal_inner(footprint: Footprint, signum: int) -> int:
    """A signal to what runs in the container, each proven by pidfd and place; how many got it.

    Not to the client: it would pass the signal on, a second time, and its end would end the container's output.
    """
    count = 0
    for pid in inner(footprint):
        found = proc.stat(pid)
        pidfd = None if found is None else proc.open_pidfd(pid, found.start_ticks)
        if pidfd is not None:
            try:
                if is_below(proc.cgroup_path(pid), footprint.cgroup or "/nowhere"):
                    count += proc.send(pidfd, signum)
            finally:
                os.close(pidfd)
    return count


def failure_said(status: int | None, log: Path, since: int) -> str | None:
    """What the client wrote into the log if it ended because its container could not be started. Blocks."""
    code = -1 if status is None else os.waitstatus_to_exitcode(status)
    if code not in _FAILED_TO_START:
        return None
    with log.open("rb") as file:
        file.seek(max(since, os.fstat(file.fileno()).st_size - _TAIL))
        lines = file.read(_TAIL).decode(errors="replace").splitlines()
    said = [line for line in lines if line.startswith(("docker: ", "Error: "))]
    return engines.short(said[-1]) if said else None


def tidy_v1(parent: str, token: int) -> None:
    """On a hybrid machine runc makes a container's cgroup in each v1 hierarchy, and removes only the last folder of its
    path: what earlier terms left there goes. Blocks."""
    with open("/proc/mounts", encoding="utf-8", errors="surrogateescape") as lines:
        mounts = [fields[1] for fields in map(str.split, lines) if len(fields) > 2 and fields[2] == "cgroup"]
    for mount in mounts:
        for term in Path(f"{mount}{parent}").glob("term-*"):
            if term.name != f"term-{token}":
                for folder, _, _ in os.walk(term, topdown=False):
                    with contextlib.suppress(OSError):  # not empty: it is still on its way out
                        os.rmdir(folder)


class Runtime:
    """One service's questions to its runtime, each with a deadline (boot-time seconds)."""

    def __init__(self, container: Container, name: str, labels: Mapping[str, str], clock: Clock) -> None:
        self._container, self._name, self._labels, self._clock = container, container_name(name), labels, clock
        self._lane = Aside(f"client-{name}")
        self._client: list[str] | None = None

    async def prepare(self, *, deadline: float) -> None:
        """The engine can keep a container below our cgroup, and there is none of this name. Raises ContainerError."""
        _, output, errors = await self._ask(engines.info_words(self._container), deadline)
        trouble = engines.verdict(self._container, output, errors)
        if trouble is not None:
            raise ContainerError(trouble.why)
        while (found := await self._find(deadline)) is not None:
            if not is_ours(found, self._labels):
                raise ContainerError(
                    f"there is a container {self._name} ({found['Id'][:12]}) that this node has not started for this "
                    "service: it is left alone; remove or rename it"
                )
            await self._remove(found["Id"], deadline)
            await self._clock.sleep_until(self._clock.now() + _LOOK_EVERY)

    async def until_placed(self, footprint: Footprint, *, deadline: float) -> None:
        """Returns when its container runs below the service's cgroup, or nothing of the service is left.

        Raises OutsideError, having ended it, where it runs elsewhere, ContainerError where it does not run.
        """
        assert footprint.cgroup is not None
        ask_at = self._clock.now() + _ASK_EVERY
        while not footprint.empty():
            if inner(footprint) or self._clock.now() >= ask_at:
                ask_at = self._clock.now() + _ASK_EVERY
                if await self._stands(footprint.cgroup, deadline):
                    return
            if self._clock.now() >= deadline:
                raise ContainerError(f"{self._container.runtime} has not started it within {START_LIMIT:g} s")
            await self._clock.sleep_until(self._clock.now() + _LOOK_EVERY)

    async def _stands(self, cgroup: str, deadline: float) -> bool:
        found = await self._find(deadline)
        pid = 0 if found is None or not is_ours(found, self._labels) else int(found["State"]["Pid"])
        path = proc.cgroup_path(pid) if pid > 0 else None
        if found is None or path is None:
            return False
        if not is_below(path, cgroup):
            await self._remove(found["Id"], deadline)
            raise OutsideError(f"its container was started in the cgroup {path}, not below {cgroup}: ended")
        return True

    async def _find(self, deadline: float) -> dict[str, Any] | None:
        """The container of our name, as the engine tells of it; None: there is none."""
        code, ids, errors = await self._ask(
            ["ps", "--all", "--quiet", "--no-trunc", "--filter", f"name=^{self._name}$"], deadline
        )
        if code != 0:
            raise ContainerError(f"{self._container.runtime} does not tell its containers: {engines.short(errors)}")
        if not ids.split():
            return None
        code, output, _ = await self._ask(["container", "inspect", ids.split()[0]], deadline)
        if code != 0:
            return None  # removed meanwhile
        try:
            found: dict[str, Any] = json.loads(output)[0]
        except (ValueError, LookupError, TypeError):
            raise ContainerError(f"{self._container.runtime} tells of {self._name} what is not known here") from None
        return found

    async def _remove(self, identity: str, deadline: float) -> None:
        """By its id: never another one that has got the name meanwhile. Whether it is gone is looked at afterwards."""
        at_once = ["--time=0"] if self._container.runtime == "podman" else []  # it would wait 10 s after a SIGTERM
        await self._ask(["rm", "--force", "--volumes", *at_once, identity], deadline)

    async def _ask(self, command: Sequence[str], deadline: float) -> tuple[int, str, str]:
        if self._client is None:
            self._client = await self._lane.read(lambda: engines.client(self._container), deadline=deadline)
        if self._client is None:
            raise ContainerError(engines.missing(self._container))
        process = await asyncio.create_subprocess_exec(
            *self._client, *command, env=engines.CLIENT_ENV, cwd="/", start_new_session=True,
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        try:
            async with asyncio.timeout_at(deadline):
                output, errors = await process.communicate()
        except TimeoutError:
            raise ContainerError(f"{self._container.runtime} does not answer to `{command[0]}`") from None
        finally:
            if process.returncode is None:
                await _end(process)
        assert process.returncode is not None
        return process.returncode, output.decode(errors="replace"), errors.decode(errors="replace")


async def _end(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError, TimeoutError):
        process.kill()
        async with asyncio.timeout(_LAST_WAIT):
            await process.wait()
