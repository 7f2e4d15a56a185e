"""A container runtime's client: how it is called, and whether its engine can keep a container below our cgroup."""

import json
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from supervisor.config.schema import Config
from supervisor.config.service import Container

CLIENT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
CLIENT_ENV = {"PATH": CLIENT_PATH, "HOME": "/root", "LANG": "C.UTF-8"}
"""All that a client has of an environment besides names and tokens: the service's own could lead a client that runs as
root elsewhere (DOCKER_HOST, LD_PRELOAD, …), and goes to the container alone."""
NO_CONFIG = "/nonexistent/gpuward"
"""Docker's client reads no configuration: contexts, plugins and proxies of root's own are no matter of the service."""
ANSWER = 5.0
"""Seconds that check-config waits for an engine."""
_MOST = 300
"""Characters of what a client says that are shown."""


@dataclass(frozen=True)
class Trouble:
    """Why a container cannot run below our cgroup."""

    why: str
    lasting: bool
    """Until somebody changes the engine's configuration; else it may be only down, or the image not there yet."""


def client(container: Container) -> list[str] | None:
    """The words before the client's command; None: it is not installed. Looks at files."""
    program = shutil.which(str(container.program or container.runtime), path=CLIENT_PATH)
    if program is None:
        return None
    if container.runtime == "podman":
        return [program]
    return [program, "--host", f"unix://{container.socket}", "--config", NO_CONFIG]


def missing(container: Container) -> str:
    """What to say where `client` is None."""
    return f"{container.program or container.runtime} is not an executable file here"


def info_words(container: Container) -> list[str]:
    """The client's command that tells of its engine."""
    return ["info", "--format", "{{json .}}" if container.runtime == "docker" else "json"]


def verdict(container: Container, output: str, errors: str) -> Trouble | None:
    """From what the client said of its engine."""
    try:
        found = json.loads(output)
    except ValueError:
        found = {}
    if container.runtime == "podman":
        return _podman(found, errors)
    if not isinstance(found, dict) or found.get("ServerErrors") or not found.get("CgroupDriver"):
        said = found.get("ServerErrors") if isinstance(found, dict) else None
        return Trouble(f"the Docker engine cannot be asked: {short(said[0] if said else errors)}", lasting=False)
    if found["CgroupDriver"] != "cgroupfs":
        return Trouble(
            f"the Docker engine's cgroup driver is {found['CgroupDriver']}, which puts no container below another's "
            'cgroup: set "exec-opts": ["native.cgroupdriver=cgroupfs"] in /etc/docker/daemon.json and restart it',
            lasting=True,
        )
    if any("rootless" in str(option) for option in found.get("SecurityOptions") or ()):
        return Trouble("a rootless Docker engine cannot put a container below gpuward's cgroup", lasting=True)
    return None


def _podman(found: Any, errors: str) -> Trouble | None:
    host = found.get("host") if isinstance(found, dict) else None
    if not isinstance(host, Mapping) or "cgroupVersion" not in host:
        return Trouble(f"podman cannot be asked: {short(errors)}", lasting=False)
    if host["cgroupVersion"] != "v2":
        why = "a hybrid machine would have other processes moved; use docker, or boot with unified cgroups"
        return Trouble(f"podman sees cgroup {host['cgroupVersion']}, and its --cgroups=split needs v2: {why}", True)
    return None


def short(said: str) -> str:
    """The last line of what a client said, cut."""
    lines = said.strip().splitlines()
    return lines[-1][:_MOST] if lines else "it said nothing"


def troubles(config: Config) -> dict[str, Trouble]:
    """By service: what is wrong with its engine or image now. Asks each engine, at most ANSWER seconds a question."""
    engines: dict[tuple[str, ...], Trouble | None] = {}
    found = {}
    for name, service in config.services.items():
        if service.container is None:
            continue
        words = client(service.container)
        if words is None:
            found[name] = Trouble(missing(service.container), lasting=False)
            continue
        if tuple(words) not in engines:
            engines[tuple(words)] = verdict(service.container, *_ask(words, info_words(service.container))[1:])
        trouble = engines[tuple(words)] or _no_image(service.container, words)
        if trouble is not None:
            found[name] = trouble
    return found


def _no_image(container: Container, words: list[str]) -> Trouble | None:
    if _ask(words, ["image", "inspect", container.image])[0] == 0:
        return None
    pull = f"`{container.runtime} pull {container.image}`"
    return Trouble(f"the image {container.image} is not on this node, and gpuward pulls none: {pull}", lasting=False)


def _ask(words: list[str], command: list[str]) -> tuple[int, str, str]:
    try:
        done = subprocess.run(
            [*words, *command],
            env=CLIENT_ENV,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=ANSWER,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return 124, "", f"no answer within {ANSWER:g} s"
    except OSError as error:
        return 126, "", str(error)
    return done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")
