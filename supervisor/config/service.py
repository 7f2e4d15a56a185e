"""The keys of one service, below `services:`. The first lines of `schema` hold here too."""

import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from supervisor.config import options
from supervisor.config.accounts import Account, account
from supervisor.config.elsewhere import lives_elsewhere
from supervisor.config.problems import wrong
from supervisor.config.section import Section
from supervisor.config.values import (
    AbsolutePath,
    PositiveSeconds,
    ProbeAddress,
    ProbeUrl,
    Seconds,
    ServiceName,
    User,
    Word,
    as_tuple,
)

SIZES = {"kB": 1000, "MB": 1000**2, "GB": 1000**3}
SMALLEST_LOG, LARGEST_LOG = 1000**2, 1000**4
"""Bytes of `log.max_size`."""
SET_BY_GPUWARD = (
    "GPUWARD_NODE",
    "GPUWARD_SERVICE",
    "GPUWARD_FENCING_TOKEN",
    "GPUWARD_RUN_DIR",
    "NOTIFY_SOCKET",
    "WATCHDOG_USEC",
    "WATCHDOG_PID",
)
"""Environment variables of a service that the configuration cannot set."""
IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_./:@-]*")


LookCommand = Annotated[tuple[Word, ...], BeforeValidator(as_tuple), Field(min_length=1)]


class Restart(Section):
    """What follows a failure: at once, then backoff, then degraded."""

    window: PositiveSeconds = 300.0
    backoff: Annotated[tuple[PositiveSeconds, ...], BeforeValidator(as_tuple), Field(min_length=1)] = (
        30.0,
        60.0,
        120.0,
    )
    healthy: PositiveSeconds = 600.0


def _size(value: Any) -> int:
    """Bytes from a number of bytes or a text such as 500kB, 50MB, 2GB."""
    match = re.fullmatch(r"([0-9]{1,12})(kB|MB|GB)", value) if isinstance(value, str) else None
    size = int(match[1]) * SIZES[match[2]] if match else value
    if isinstance(size, bool) or not isinstance(size, int) or not SMALLEST_LOG <= size <= LARGEST_LOG:
        raise wrong("a size such as 500kB, 50MB or 2GB, or a number of bytes, from 1MB to 1000GB")
    return size


class Log(Section):
    """When the file with a service's output is cut, and how many earlier pieces are kept."""

    max_size: Annotated[int, BeforeValidator(_size)] = 50_000_000
    """Bytes."""
    keep: int = Field(default=10, ge=1, le=1000)


def _one_kind(section: Any, *kinds: str) -> None:
    found = [name for name in kinds if getattr(section, name) is not None]
    if len(found) != 1:
        raise wrong(f"exactly one of {', '.join(kinds[:-1])} and {kinds[-1]}", found=", ".join(found) or "none")


class Readiness(Section):
    """How a service shows that it can do its work: exactly one of `notify`, `tcp`, `http` and `command`."""

    notify: Literal[True] | None = None
    tcp: ProbeAddress | None = None
    http: ProbeUrl | None = None
    command: LookCommand | None = None
    """Run in the service's cgroup, as its user and with its environment: 0 within 2 s is ready."""
    model: Word | None = None
    """With `http`: its answer lists this model, as /v1/models does."""
    timeout: PositiveSeconds = 600.0
    """From the start; a service that is not ready by then has failed."""

    @model_validator(mode="after")
    def _is_one(self) -> "Readiness":
        _one_kind(self, "notify", "tcp", "http", "command")
        if self.model is not None and self.http is None:
            raise wrong("`model` with `http` only", found="another kind")
        return self


class Liveness(Section):
    """A look at whether a service that became ready still works: exactly one of `tcp`, `http` and `command`."""

    tcp: ProbeAddress | None = None
    http: ProbeUrl | None = None
    command: LookCommand | None = None
    every: PositiveSeconds = 20.0
    """From the start of one look to the start of the next."""
    timeout: PositiveSeconds = 5.0
    """For one look."""
    failures: int = Field(default=3, ge=1, le=1000)
    """So many looks in a row must fail."""

    @model_validator(mode="after")
    def _is_one(self) -> "Liveness":
        _one_kind(self, "tcp", "http", "command")
        return self

    @field_validator("timeout")
    @classmethod
    def _one_at_a_time(cls, value: float, info: ValidationInfo) -> float:
        if value > info.data.get("every", float("inf")):
            raise wrong("at most `every`", hint="a look must be over before the next one begins")
        return value


class Sidecar(Section):
    """A process that starts before a service, in its cgroup, and lives and dies with it."""

    command: Annotated[tuple[Word, ...], BeforeValidator(as_tuple), Field(min_length=1)]
    env: dict[str, Word] = Field(default_factory=dict)
    env_file: AbsolutePath | None = None
    user: User | None = None
    """None: the service's."""
    cwd: AbsolutePath = Path("/")
    readiness: Readiness | None = None
    """None: ready once it has lived for `ready_after`."""
    ready_after: Seconds = 1.0

    @field_validator("command")
    @classmethod
    def _stays_in_the_cgroup(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return _stays_here(value)

    @field_validator("env")
    @classmethod
    def _names_are_free(cls, value: dict[str, str]) -> dict[str, str]:
        return _free_names(value)

    @field_validator("readiness")
    @classmethod
    def _is_from_outside(cls, value: Readiness | None) -> Readiness | None:
        if value is not None and value.command is not None:
            raise wrong("notify, tcp or http", found="command", hint="a command looks at the service itself")
        return value

    @property
    def account(self) -> Account | None:
        """None: the service's. Raises KeyError when this machine does not know it."""
        return None if self.user is None else account(self.user)


def _stays_here(value: tuple[str, ...]) -> tuple[str, ...]:
    """Of a command: its processes stay in the service's cgroup."""
    if not value[0].rpartition("/")[2]:
        raise wrong("a program as first word", found="an empty word" if not value[0] else "a folder")
    if elsewhere := lives_elsewhere(value):
        program, why = elsewhere
        raise wrong("a command whose processes stay in the service's cgroup", found=program, hint=why)
    return value


def _free_names(value: dict[str, str]) -> dict[str, str]:
    """Of variables: nothing that gpuward sets."""
    for name in value:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise wrong("names of letters, digits and _", found="another kind of name (not shown)")
        if name in SET_BY_GPUWARD:
            raise wrong("variables that gpuward does not set itself", found=name)
    return value


class Container(Section):
    """A container that docker or podman starts below the service's cgroup."""

    runtime: Literal["docker", "podman"]
    image: Word
    args: Annotated[tuple[Word, ...], BeforeValidator(as_tuple)] = ()
    """Its command line, after the image."""
    options: Annotated[tuple[Word, ...], BeforeValidator(as_tuple)] = ()
    """More options of the runtime's `run`, each --NAME or --NAME=VALUE."""
    program: AbsolutePath | None = None
    """The runtime's client; None: as found on PATH."""
    socket: AbsolutePath = Path("/run/docker.sock")
    """Of the Docker engine; podman has none."""

    @field_validator("runtime")
    @classmethod
    def _podman_is_roots(cls, value: str) -> str:
        if value == "podman" and os.geteuid() != 0:
            raise wrong("docker, or gpuward run by root", hint="a rootless podman cannot run a container as `user`")
        return value

    @field_validator("image")
    @classmethod
    def _is_a_name(cls, value: str) -> str:
        if not IMAGE.fullmatch(value):
            raise wrong("the name of an image, such as registry.example/vllm:0.9")
        return value

    @field_validator("options")
    @classmethod
    def _leave_the_guarantees_alone(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for option in value:
            if trouble := options.trouble(option):
                raise wrong("options that gpuward does not set or forbid", found=trouble[0], hint=trouble[1])
        return value


class Service(Section):
    """A process tree that gpuward starts, watches and repairs."""

    container: Container | None = None
    """In place of `command`."""
    command: Annotated[tuple[Word, ...], BeforeValidator(as_tuple)] = ()
    """Of a container: the name of its runtime alone."""
    env: dict[str, Word] = Field(default_factory=dict)
    env_file: AbsolutePath | None = None
    user: User
    """A name (str) or a uid (int) that this machine knows; see `account`."""
    cwd: AbsolutePath = Path("/")
    gpu: int | None = Field(default=None, ge=0)
    lock: Literal["on-demand", "lifetime"] | None = None
    gpu_fd: Literal["optional", "required"] | None = None
    """As written; None: by `lock`. See `needs_gpu_fd`."""
    start_grace: Seconds = 60.0
    ready_after: Seconds = 5.0
    readiness: Readiness | None = None
    """None: ready once it has lived for `ready_after`."""
    liveness: Liveness | None = None
    sidecars: dict[ServiceName, Sidecar] = Field(default_factory=dict)
    """By name; they start in this order, each once the one before is ready."""
    heartbeat: PositiveSeconds | None = None
    """Once ready it says WATCHDOG=1 at least so often."""
    max_gpu_section: PositiveSeconds = 60.0
    stop_timeout: Seconds = 60.0
    drain_signal: Literal["HUP", "INT", "QUIT", "USR1", "USR2", "WINCH"] | None = None
    """Tells it to take no new work; None: it is told nothing."""
    priority: int = 0
    after: Annotated[tuple[ServiceName, ...], BeforeValidator(as_tuple)] = ()
    """Services that must be running before it is started."""
    max_hold: PositiveSeconds | None = None
    """How long it may hold its GPU's lock; None: see `supervisor.lockwatch`."""
    reset_gpu: Literal["after-kill", "always", "on-fault", "never"] = "after-kill"
    """When its GPU is reset before the next start: see `supervisor.service.device`."""
    restart: Restart = Restart()
    log: Log = Log()

    @field_validator("command")
    @classmethod
    def _stays_in_its_cgroup(cls, value: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        container: Container | None = info.data.get("container")
        if "container" not in info.data:  # it is wrong itself
            return value
        if container is not None:
            if value:
                raise wrong("no `command` beside `container`", found="both", hint="its words are container.args")
            return (container.runtime,)
        if not value:
            raise wrong("this key", found="nothing", hint="it is required, unless there is a `container`")
        return _stays_here(value)

    @field_validator("env")
    @classmethod
    def _names_are_free(cls, value: dict[str, str], info: ValidationInfo) -> dict[str, str]:
        for name in value:
            if info.data.get("container") is not None and "\n" in value[name]:
                raise wrong("values of one line", found=name, hint="a container is given its variables by lines")
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
                raise wrong("names of letters, digits and _", found="another kind of name (not shown)")
            if name in SET_BY_GPUWARD:
                raise wrong("other names", found=name, hint="gpuward sets it itself")
        return value

    @field_validator("gpu")
    @classmethod
    def _gpuward_chooses_the_device(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None and "CUDA_VISIBLE_DEVICES" in info.data.get("env", {}):
            raise wrong("no CUDA_VISIBLE_DEVICES in env", hint="gpuward sets it from `gpu`")
        return value

    @field_validator("lock")
    @classmethod
    def _lock_goes_with_gpu(cls, value: str | None, info: ValidationInfo) -> str | None:
        gpu = info.data.get("gpu", "unknown")
        if gpu is None and value is not None:
            raise wrong("no `lock` where no `gpu` is", hint="name the gpu, or leave lock out")
        if isinstance(gpu, int) and value is None:
            raise wrong("lock: on-demand or lock: lifetime", hint="it must be chosen where gpu is set")
        if value == "on-demand" and info.data.get("container") is not None:
            raise wrong("lock: lifetime", hint="`gpuward lock run` does not reach the keeper from inside a container")
        return value

    @field_validator("gpu_fd")
    @classmethod
    def _fd_goes_with_gpu(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is not None and info.data.get("gpu", "unknown") is None:
            raise wrong("no `gpu_fd` where no `gpu` is")
        return value

    @field_validator("reset_gpu")
    @classmethod
    def _resets_what_it_has(cls, value: str, info: ValidationInfo) -> str:
        if value != "after-kill" and info.data.get("lock") != "lifetime":
            raise wrong("no `reset_gpu` without `lock: lifetime`", hint="the GPU of others is not reset")
        return value

    @field_validator("max_hold")
    @classmethod
    def _holding_goes_with_gpu(cls, value: float | None, info: ValidationInfo) -> float | None:
        if value is not None and info.data.get("gpu", "unknown") is None:
            raise wrong("no `max_hold` where no `gpu` is")
        return value

    @field_validator("readiness", "liveness")
    @classmethod
    def _no_command_beside_a_container(cls, value: Any, info: ValidationInfo) -> Any:
        if value is not None and value.command is not None and info.data.get("container") is not None:
            raise wrong("tcp or http", found="command", hint="a command would run outside the container")
        return value

    @property
    def program(self) -> str:
        """What it runs, for people: its program, or its image."""
        return self.command[0] if self.container is None else self.container.image

    @property
    def needs_gpu_fd(self) -> bool:
        """Must the service have the device open? By `gpu_fd`, else exactly where the lock is `lifetime`."""
        return self.lock == "lifetime" if self.gpu_fd is None else self.gpu_fd == "required"

    @property
    def account(self) -> Account:
        """Uid, gid, groups and home of `user`, read from the machine each time."""
        return account(self.user)
