"""The kinds of value that the configuration is made of: durations, paths, names, addresses.

Each validator takes what YAML gives and raises `wrong(…)` with what it expected instead.
"""

import ipaddress
import os
import re
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import SplitResult, urlsplit

from pydantic import AfterValidator, BeforeValidator

from supervisor.config.accounts import account, group_id
from supervisor.config.problems import wrong

UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
LONGEST = 366 * 24 * 3600.0
"""Seconds. A longer duration is a typing error, and the keeper's nanoseconds must fit 64 bits."""
HIGHEST_ID = 2**32 - 2
"""Of uid_t and gid_t; 2**32 - 1 means "no change" to chown(2)."""
MAX_SOCKET_PATH = 107
"""Bytes, unix(7): sun_path has 108, the last one NUL."""
DURATION = "a duration such as 500ms, 60s, 5m or 4h, or a number of seconds"


def duration(value: Any) -> float:
    """Seconds from a number of seconds or a text such as 500ms, 60s, 5m, 4h."""
    seconds: float
    if isinstance(value, int | float) and not isinstance(value, bool):
        seconds = float(value) if abs(value) <= LONGEST else LONGEST + 1
    else:
        match = re.fullmatch(r"([0-9]{1,12}(?:\.[0-9]{1,9})?)(ms|s|m|h)", value) if isinstance(value, str) else None
        if match is None:
            raise wrong(DURATION)
        seconds = float(match[1]) * UNITS[match[2]]
    if not 0 <= seconds <= LONGEST:
        raise wrong(f"{DURATION}, from 0 to 366 days")
    return seconds


def positive(seconds: float) -> float:
    if seconds <= 0:
        raise wrong("a duration above 0")
    return seconds


def absolute_path(value: Any) -> Path:
    if isinstance(value, Path):
        value = str(value)
    if not isinstance(value, str) or not value.startswith("/") or "\0" in value:
        raise wrong("an absolute path", hint="~ and variables are not expanded" if text_has_home(value) else "")
    return Path(value)


def text_has_home(value: Any) -> bool:
    return isinstance(value, str) and value.startswith(("~", "$"))


def node_name(value: str) -> str:
    if not re.fullmatch(r"[a-z0-9-]{1,63}", value):
        raise wrong("1 to 63 of a-z, 0-9 and -")
    return value


def service_name(value: str) -> str:
    if not re.fullmatch(r"[a-z0-9][a-z0-9-]{0,62}", value):
        raise wrong("a service name: 1 to 63 of a-z, 0-9 and -, not beginning with -")
    return value


def cgroup_path(value: str) -> str:
    parts = value.split("/")
    if len(value) > 255 or not all(re.fullmatch(r"[A-Za-z0-9_.@:\\-]+", part) and part.strip(".") for part in parts):
        raise wrong("a path below the cgroup v2 mount, such as gpuward or gpuward.slice/node")
    return value


def user(value: Any) -> str | int:
    """A user that this machine knows and that this process can start services as."""
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise wrong("a user name or uid")
    try:
        if isinstance(value, int) and not 0 <= value <= HIGHEST_ID:
            raise KeyError(value)
        uid = account(value).uid
    except (KeyError, ValueError):  # ValueError: a NUL byte in the name
        raise wrong("a user of this machine") from None
    own = os.geteuid()
    if own not in (0, uid):
        raise wrong(
            f"uid {own}, the user that runs gpuward here",
            hint="only root can start services as another user; check-config needs the same user as run",
        )
    return value


def group(value: Any) -> str | int:
    """A group that this machine knows and that this process can give files to."""
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise wrong("a group name or gid")
    try:
        gid = group_id(value)
    except (KeyError, ValueError):
        raise wrong("a group of this machine") from None
    if not 0 <= gid <= HIGHEST_ID:
        raise wrong("a group name or gid")
    if os.geteuid() != 0 and gid not in {os.getegid(), *os.getgroups()}:
        raise wrong("a group of the user that runs gpuward", hint="only root can give files to another group")
    return value


def split_url(value: str) -> SplitResult | None:
    """The parts of a plain http or https URL with a host and a valid port; None for anything else."""
    try:
        parts = urlsplit(value)
        if parts.hostname and (parts.port is None or parts.port > 0) and parts.scheme in ("http", "https"):
            return None if re.search(r"[\s\x00-\x1f]", value) or parts.query or parts.fragment else parts
    except ValueError:
        pass
    return None


def node_url(value: str) -> str:
    if "@" in value:
        raise wrong("a URL without user and password", found="a URL with an @ (not shown)")
    if split_url(value) is None:
        raise wrong("a URL such as http://gpu1:8009")
    return value.rstrip("/")


def probe_address(value: str) -> str:
    """Where a service listens on this machine."""
    if host_and_port(value)[1] == 0:
        raise wrong("a port from 1 to 65535")
    return value


def probe_url(value: str) -> str:
    """A URL that is asked on this machine: http, and no user in it."""
    if "@" in value:
        raise wrong("a URL without user and password", found="a URL with an @ (not shown)")
    parts = split_url(value)
    if parts is None or parts.scheme != "http":
        raise wrong("a URL such as http://127.0.0.1:8000/health")
    return value


def endpoint(value: str) -> str:
    """The address of an etcd member: http://host:port or https://host:port."""
    if "@" in value:
        raise wrong("an endpoint without user and password", found="a URL with an @ (not shown)")
    parts = split_url(value)
    if parts is None or parts.port is None or parts.path not in ("", "/"):
        raise wrong("http://host:port or https://host:port, such as http://127.0.0.1:2379")
    return value.rstrip("/")


def etcd_user(value: str) -> str:
    """The name of a user in etcd; a password after a colon, as etcdctl takes it, does not belong there."""
    if ":" in value:
        raise wrong("a user's name alone", found="a text with a colon (not shown)", hint="the password has its file")
    if not value or not value.isprintable():
        raise wrong("a user's name")
    return value


def host_and_port(value: str) -> tuple[str, int]:
    """Host and port of `127.0.0.1:8009` or `[::1]:8009`. Raises `wrong(…)`."""
    match = re.fullmatch(r"(?:\[([0-9a-fA-F:.]+)\]|([^\s:/\[\]]+)):([0-9]{1,20})", value, re.ASCII)
    if match is None:
        raise wrong("host:port, such as 127.0.0.1:8009")
    if int(match[3]) > 65535:
        raise wrong("a port from 1 to 65535")
    return match[1] or match[2], int(match[3])


def listen_address(value: str) -> str:
    """Where the HTTP server listens: loopback only, a fixed port."""
    host, port = host_and_port(value)
    try:
        loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = False
    if not loopback:
        raise wrong(
            "a loopback address, such as 127.0.0.1:8009",
            hint="this version has no authentication, so it does not listen for other machines",
        )
    if port == 0:
        raise wrong("a port from 1 to 65535", hint="with port 0 nobody would know where the status is")
    return value


def without_nul(value: str) -> str:
    if "\0" in value:
        raise wrong("a text without NUL bytes", found="a NUL byte")
    return value


def as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


Seconds = Annotated[float, BeforeValidator(duration)]
PositiveSeconds = Annotated[float, BeforeValidator(duration), AfterValidator(positive)]
AbsolutePath = Annotated[Path, BeforeValidator(absolute_path)]
NodeName = Annotated[str, AfterValidator(node_name)]
ServiceName = Annotated[str, AfterValidator(service_name)]
CgroupPath = Annotated[str, AfterValidator(cgroup_path)]
User = Annotated[Any, AfterValidator(user)]
Group = Annotated[Any, AfterValidator(group)]
NodeUrl = Annotated[str, AfterValidator(node_url)]
EtcdUser = Annotated[str, AfterValidator(etcd_user)]
Endpoint = Annotated[str, AfterValidator(endpoint)]
ProbeAddress = Annotated[str, AfterValidator(probe_address)]
ProbeUrl = Annotated[str, AfterValidator(probe_url)]
ListenAddress = Annotated[str, AfterValidator(listen_address)]
Word = Annotated[str, AfterValidator(without_nul)]
