"""Every key of the configuration, with its kind, default and meaning. `loading.load` makes a `Config` from files.

Times are seconds (float). A key that is not here is refused: a misspelt one must not be taken for a default.
"""

import re
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator

from election.timing import CLOCK_ERROR, RISKY_TTL, SHORTEST_TTL, Timing, TimingError
from supervisor.config.accounts import group_id
from supervisor.config.problems import wrong
from supervisor.config.section import Section
from supervisor.config.service import Service
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
    Seconds,
    ServiceName,
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
MONITORS = tuple(
    Path("/usr/bin") / name
    for name in ("dcgm-exporter", "nv-fabricmanager", "nv-hostengine", "nvidia-persistenced", "nvidia-smi", "nvtop")
)
"""Where NVIDIA's and the distributions' packages put them."""


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
    services: dict[ServiceName, Service] = Field(default_factory=dict)

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
