"""Which options of `docker run` and `podman run` a container may be given, and why not the others.

Only those that leave gpuward's guarantees alone: cgroup, name, GPU, user, environment, start and stop are gpuward's.
"""

import re

ALLOWED = frozenset(
    [
        *(
            "add-host",
            "dns",
            "dns-option",
            "dns-search",
            "domainname",
            "expose",
            "hostname",
            "network",
            "network-alias",
        ),
        *(
            "publish",
            "publish-all",
            "cap-add",
            "cap-drop",
            "group-add",
            "security-opt",
            "sysctl",
            "ulimit",
            "read-only",
        ),
        *("blkio-weight", "cpu-shares", "cpus", "cpuset-cpus", "cpuset-mems", "memory", "memory-reservation"),
        *(
            "memory-swap",
            "oom-score-adj",
            "pids-limit",
            "shm-size",
            "storage-opt",
            "device",
            "mount",
            "tmpfs",
            "volume",
        ),
        *("volumes-from", "entrypoint", "init", "ipc", "uts", "label", "no-healthcheck"),
    ]
)
"""Names of both runtimes' options, without dashes."""
_CGROUP = "it would run outside the service's cgroup, where gpuward can neither watch nor end it"
_START = "gpuward starts and ends it, and nobody else"
_ENV = "use `env` or `env_file`: values among options are seen by everybody"
_GPU = "gpuward gives it the GPU of `gpu`, by its UUID"
_ISOLATION = "it could leave the service's cgroup, or use a GPU whose lock it does not have"
_STOP = "gpuward stops it by SIGTERM, and SIGKILL after `stop_timeout`"
_LOG = "its output goes to the service's log file"
REFUSED = {
    **dict.fromkeys(("cgroup-parent", "cgroups", "cgroupns", "cgroup-conf", "pod", "pod-id-file", "runtime"), _CGROUP),
    **dict.fromkeys(("d", "detach", "restart", "rm", "replace", "name", "cidfile", "pull", "requires"), _START),
    **dict.fromkeys(("e", "env", "env-file", "env-host"), _ENV),
    **dict.fromkeys(("gpus", "device-cgroup-rule"), _GPU),
    **dict.fromkeys(("privileged", "pid", "userns", "systemd"), _ISOLATION),
    **dict.fromkeys(("stop-signal", "stop-timeout", "timeout", "sig-proxy"), _STOP),
    **dict.fromkeys(("log-driver", "log-opt", "attach", "a", "interactive", "i", "tty", "t"), _LOG),
    **dict.fromkeys(("user", "u"), "use the service's `user`"),
    **dict.fromkeys(("workdir", "w"), "use the service's `cwd`"),
    "sdnotify": "use the service's `readiness`",
}
"""Reasons for options that people do write."""
_SOCKETS = re.compile(r"(docker|podman|containerd|crio|keeper|keeper-control|api)\.sock\b")


def trouble(option: str) -> tuple[str, str] | None:
    """(what was found, why it is refused); None: this option may be used. Shows names, never values."""
    match = re.fullmatch(r"(--?)([A-Za-z0-9-]+)(?:=(.*))?", option, re.DOTALL)
    if match is None:
        return (
            "a word that is not --NAME or --NAME=VALUE",
            "write option and value as one word, --volume=/models:/models",
        )
    dashes, name, value = match.groups()
    name = name.lower() if dashes == "--" else name
    shown = f"{dashes}{name}"
    if name in REFUSED:
        return shown, REFUSED[name]
    if dashes != "--":
        return shown, "write the long name, as one word with its value: --volume=/models:/models"
    if name not in ALLOWED:
        return shown, f"known here: {', '.join(sorted(ALLOWED))}"
    if name == "label" and (value or "").startswith("gpuward."):
        return shown, "labels that begin with gpuward. are gpuward's"
    if name == "device" and "nvidia" in (value or ""):
        return shown, _GPU
    if name in {"volume", "mount"} and _SOCKETS.search(value or ""):
        return f"{shown} with the socket of an engine or of gpuward", _ISOLATION
    return None
