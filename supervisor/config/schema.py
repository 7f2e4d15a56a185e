"""Every key of the configuration, with its kind, default and meaning. `loading.load` makes a `Config` from files.

Times are seconds (float). A key that is not here is refused: a misspelt one must not be taken for a default.
"""

import os
import re
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from election.timing import CLOCK_ERROR, RISKY_TTL, SHORTEST_TTL, Timing, TimingError
from supervisor.config import options
from supervisor.config.accounts import Account, account, group_id
from supervisor.config.elsewhere import lives_elsewhere
from supervisor.config.problems import wrong
from supervisor.config.values import (
    MAX_SOCKET_PATH,
    AbsolutePath,
    CgroupPath,
    Endpoint,
    EtcdUser,
    Group,
    ListenAddress,
    NodeName,
    NodeUrl,
    PositiveSeconds,
    ProbeAddress,
    ProbeUrl,
    Seconds,
    ServiceName,
    User,
    Word,
    as_tuple,
    host_and_port,
)
from supervisor.keeper.protocol import CONTROL_SOCKET

if TYPE_CHECKING:
    from election.stores.etcd_access import Access

LONGEST_TTL = 86400
"""Seconds. A longer one is a typing error: nobody wants to wait a day for a take-over."""
HIGHEST_PRIORITY = 10
PRIORITY_STEP = 0.2
"""Seconds of a claim's delay for each step of a node's priority: more than a claim takes on a near store."""
LONGEST_RESET = 30
"""Seconds: timeout of the hardware watchdog at most. Many devices take no more than a minute."""
MOST_GPUS = 64
ETCD_QUOTA = 2 << 30
"""Bytes: etcd's own default (`--quota-backend-bytes`)."""
SMALLEST_QUOTA, LARGEST_QUOTA = 1 << 20, 1 << 40
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
MONITORS = tuple(
    Path("/usr/bin") / name
    for name in ("dcgm-exporter", "nv-fabricmanager", "nv-hostengine", "nvidia-persistenced", "nvidia-smi", "nvtop")
)
"""Where NVIDIA's and the distributions' packages put them."""
IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_./:@-]*")


LookCommand = Annotated[tuple[Word, ...], BeforeValidator(as_tuple), Field(min_length=1)]


class Section(BaseModel):
    """A mapping of the configuration: unknown keys refused, no silent conversion, never changed once loaded."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, validate_default=True)


class EtcdStore(Section):
    """Where the members of etcd are, and what they want to see. Secrets stand in files of their own."""

    endpoints: Annotated[tuple[Endpoint, ...], BeforeValidator(as_tuple), Field(min_length=1)]
    ca_file: AbsolutePath | None = None
    """None: the CAs that this machine trusts."""
    cert_file: AbsolutePath | None = None
    key_file: AbsolutePath | None = None
    user: EtcdUser | None = None
    password_file: AbsolutePath | None = None
    quota: int = Field(default=ETCD_QUOTA, ge=SMALLEST_QUOTA, le=LARGEST_QUOTA)
    """Bytes; where etcd tells its own, that is taken."""

    @field_validator("endpoints")
    @classmethod
    def _each_once(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(value)) != len(value):
            raise wrong("each endpoint once", found="one of them twice")
        return value

    @field_validator("ca_file", "cert_file", "key_file")
    @classmethod
    def _tls_everywhere(cls, value: Path | None, info: ValidationInfo) -> Path | None:
        if value is not None and any(at.startswith("http://") for at in info.data.get("endpoints", ())):
            raise wrong("https:// in all endpoints", found="http://", hint="this file is for TLS")
        return value

    @field_validator("key_file")
    @classmethod
    def _key_goes_with_certificate(cls, value: Path | None, info: ValidationInfo) -> Path | None:
        if "cert_file" in info.data:
            _both("cert_file", info.data["cert_file"], "key_file", value)
        return value

    @field_validator("password_file")
    @classmethod
    def _password_goes_with_user(cls, value: Path | None, info: ValidationInfo) -> Path | None:
        if "user" in info.data:
            _both("user", info.data["user"], "password_file", value)
        return value

    @property
    def access(self) -> "Access":
        """What the store needs of it."""
        from election.stores.etcd_access import Access  # it needs ssl and structlog, which most commands do not

        return Access(self.ca_file, self.cert_file, self.key_file, self.user, self.password_file)


def _both(first: str, one: object, second: str, other: object) -> None:
    if (one is None) != (other is None):
        raise wrong(f"both `{first}` and `{second}`, or neither", found=f"`{second if one is None else first}` alone")


class LocalStore(Section):
    """The SQLite file that all supervisors of one machine share."""

    file: AbsolutePath = Path("/var/lib/gpuward/election.db")


class Election(Section):
    """Who may act, and for how long without a refresh."""

    ttl: int = Field(default=90, ge=SHORTEST_TTL, le=LONGEST_TTL)
    clock_error: float = Field(default=CLOCK_ERROR, ge=0, lt=0.5)
    priority: int = Field(default=HIGHEST_PRIORITY, ge=0, le=HIGHEST_PRIORITY)
    """The larger goes first where several nodes could take over."""
    store: Literal["etcd", "local"]
    etcd: EtcdStore | None = None
    local: LocalStore = LocalStore()

    @field_validator("clock_error")
    @classmethod
    def _times_add_up(cls, value: float, info: ValidationInfo) -> float:
        if "ttl" in info.data:
            try:
                Timing(info.data["ttl"], clock_error=value)
            except TimingError as error:
                raise wrong("a clock error for which the times add up", hint=str(error)) from None
        return value

    @field_validator("etcd")
    @classmethod
    def _etcd_is_named(cls, value: EtcdStore | None, info: ValidationInfo) -> EtcdStore | None:
        if value is None and info.data.get("store") == "etcd":
            raise wrong("etcd: {endpoints: [http://127.0.0.1:2379]}", hint="`store: etcd` needs it")
        return value

    @property
    def claim_delay(self) -> float:
        """Seconds by which this node claims later than it could."""
        return (HIGHEST_PRIORITY - self.priority) * PRIORITY_STEP

    @property
    def timing(self) -> Timing:
        """All times of the election."""
        return Timing(self.ttl, clock_error=self.clock_error)


class Paths(Section):
    """The folders of this node. Two nodes on one machine need folders of their own."""

    run: AbsolutePath = Path("/run/gpuward")
    state: AbsolutePath = Path("/var/lib/gpuward")
    log: AbsolutePath = Path("/var/log/gpuward")

    @field_validator("run")
    @classmethod
    def _sockets_fit(cls, value: Path) -> Path:
        longest = MAX_SOCKET_PATH - len(CONTROL_SOCKET) - 1
        if len(bytes(value)) > longest:
            raise wrong(f"a path of at most {longest} bytes", hint="the keeper's socket lies in it, see unix(7)")
        return value


class SimulatedGpu(Section):
    """GPUs that are files in a folder: for demo, tests and laptops."""

    folder: AbsolutePath = Path("/var/lib/gpuward/simulated-gpu")
    count: int = Field(default=1, ge=1, le=MOST_GPUS)


def _driver(value: Any) -> Any:
    if value == "nvidia":
        raise wrong("simulated", hint="this version has only the simulated driver")
    return value


class Gpu(Section):
    """The GPUs of this node and their lock files."""

    driver: Annotated[Literal["simulated"], BeforeValidator(_driver)]
    simulated: SimulatedGpu = SimulatedGpu()
    foreign: Literal["refuse", "terminate", "ignore"] = "refuse"
    """What becomes of processes on a GPU that gpuward did not start: see `supervisor.foreign`."""
    monitors: Annotated[tuple[AbsolutePath, ...], BeforeValidator(as_tuple)] = MONITORS
    """Executables that may be on a GPU at any time."""
    lock_file: Word | None = None
    """A template with {index}; None: gpu-{index}.lock in `paths.run`. See `Config.lock_file`."""

    @field_validator("lock_file")
    @classmethod
    def _one_file_per_gpu(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is None:
            return None
        if not value.startswith("/") or re.search(r"[{}]", value.replace("{index}", "")):
            raise wrong("an absolute path with {index} as its only placeholder")
        several = "simulated" in info.data and info.data["simulated"].count > 1
        if several and "{index}" not in value:
            raise wrong("a path with {index}", hint="there is more than one GPU, and each has a lock file of its own")
        return value


class Api(Section):
    """The HTTP endpoint with the status."""

    listen: ListenAddress = "127.0.0.1:8009"

    @property
    def host(self) -> str:
        return host_and_port(self.listen)[0]

    @property
    def port(self) -> int:
        return host_and_port(self.listen)[1]


class Watchdog(Section):
    """How often every service is looked at."""

    interval: PositiveSeconds = 60.0
    confirm: Seconds = 3.0
    """Between the first sight of a fault and the second look that must see it too."""

    @field_validator("confirm")
    @classmethod
    def _within_a_round(cls, value: float, info: ValidationInfo) -> float:
        if value >= info.data.get("interval", float("inf")):
            raise wrong("a duration below `interval`", hint="the second look belongs to the same round")
        return value


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
    env: dict[str, Word] = {}
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
    env: dict[str, Word] = {}
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
    sidecars: dict[ServiceName, Sidecar] = {}
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


def _off(value: Any) -> Any:
    """YAML reads the bare word as false."""
    return "off" if value is False else value


class HardwareWatchdog(Section):
    """The machine's own watchdog as last resort: see `supervisor.keeper.hardware`."""

    mode: Annotated[Literal["off", "automatic", "required"], BeforeValidator(_off)] = "off"
    device: AbsolutePath = Path("/dev/watchdog")


class Reach(Section):
    """Where a node's daemon answers: all that a command needs of the file which only asks it."""

    model_config = ConfigDict(extra="ignore")

    paths: Paths = Paths()
    api: Api = Api()


def _short_host_name() -> str:
    return socket.gethostname().partition(".")[0].lower()


class Config(Section):
    """A whole configuration. Its values are valid one by one and together, on this machine."""

    cluster: NodeName
    node: NodeName = Field(default_factory=_short_host_name)
    url: NodeUrl | None = None
    """As written; None: made from `api.listen`. See `status_url`."""
    election: Election
    paths: Paths = Paths()
    group: Group | None = None
    """A name (str) or a gid (int); see `gid`."""
    admin_group: Group | None = None
    """A name (str) or a gid (int): who may start and stop services; see `admin_gid`. None: root only."""
    cgroup: CgroupPath = "gpuward"
    allow_weak_containment: bool = False
    gpu: Gpu
    api: Api = Api()
    watchdog: Watchdog = Watchdog()
    hardware_watchdog: HardwareWatchdog = HardwareWatchdog()
    services: dict[ServiceName, Service] = {}

    @field_validator("hardware_watchdog")
    @classmethod
    def _has_time(cls, value: HardwareWatchdog, info: ValidationInfo) -> HardwareWatchdog:
        election = info.data.get("election")
        if value.mode != "off" and election is not None and election.ttl < RISKY_TTL:
            hint = "such devices count whole seconds, and a smaller TTL has less than one between switch and take-over"
            raise wrong(f"mode: off, or `election.ttl` of {RISKY_TTL} or more", hint=hint)
        return value

    @property
    def hardware_option(self) -> str | None:
        """As the keeper takes it. The timeout is a third of the TTL, at most half a minute."""
        wanted, timing = self.hardware_watchdog, self.election.timing
        if wanted.mode == "off" or (wanted.mode == "automatic" and not wanted.device.exists()):
            return None
        after_ns = round((timing.ttl - timing.switch) * 1e9)
        return f"{wanted.device},{min(LONGEST_RESET, timing.ttl // 3)},{after_ns},{wanted.mode}"

    @property
    def status_url(self) -> str:
        """Where others reach this node's status."""
        return self.url or f"http://{self.api.listen}"

    @property
    def gid(self) -> int | None:
        """The gid of `group`."""
        return None if self.group is None else group_id(self.group)

    @property
    def admin_gid(self) -> int | None:
        """The gid of `admin_group`."""
        return None if self.admin_group is None else group_id(self.admin_group)

    @property
    def gpu_indexes(self) -> range:
        return range(self.gpu.simulated.count)

    def lock_file(self, index: int) -> Path:
        """The lock file of a GPU."""
        template = self.gpu.lock_file or str(self.paths.run / "gpu-{index}.lock")
        return Path(template.replace("{index}", str(index)))
