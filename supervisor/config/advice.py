"""What a valid configuration can still get wrong: warnings, for people."""

import os
import shutil
import time

from supervisor.config.schema import Config, EtcdStore
from supervisor.config.service import Service, Sidecar

DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""Where the programs of services are looked for, unless `env` has a PATH."""


def warnings(config: Config) -> list[str]:
    """One sentence each, with the consequence. Looks at this machine's files, changes nothing."""
    etcd = config.election.store == "etcd"
    found = [f"election.{text}" for text in config.election.timing.warnings()] if etcd else []
    if etcd and config.election.etcd is not None:
        found += [f"election.etcd: {text}" for text in _of_etcd(config.election.etcd)]
    if config.election.store == "local" and config.election.etcd is not None:
        found.append("election.etcd: not used with `store: local`")
    if not config.services:
        found.append("services: none are declared, so this node has nothing to watch")
    for name, service in config.services.items():
        found += [f"services.{name}.{text}" for text in (*_of_service(service), *_never_gets_the_gpu(service, config))]
    return found + _waiting_for_ever(config)


def _of_etcd(etcd: EtcdStore) -> list[str]:
    plain = etcd.user is not None and any(endpoint.startswith("http://") for endpoint in etcd.endpoints)
    found = ["over http:// the user's password can be read on the way; use https://"] if plain else []
    return found + etcd.access.troubles(time.time())


def _of_service(service: Service) -> list[str]:
    found = []
    if service.account.uid == 0:
        found.append("user: root: a fault in this service can take the whole machine; name a user of its own")
    if service.container is None and not _exists(service):
        found.append(f"command: {service.command[0]!r} is not an executable file here, so it cannot start")
    if service.container is None and not service.cwd.is_dir():
        found.append(f"cwd: {service.cwd} is not a folder here, so it cannot start")
    if service.env_file is not None and not service.env_file.is_file():
        found.append(f"env_file: {service.env_file} is not a file here, so it cannot start")
    for name, sidecar in service.sidecars.items():
        if not _exists(sidecar):
            found.append(
                f"sidecars.{name}.command: {sidecar.command[0]!r} is not an executable file here, so it cannot start"
            )
    return found


def _never_gets_the_gpu(service: Service, config: Config) -> list[str]:
    """The keeper's socket is for its own user, root, and `group`."""
    account = service.account
    if service.lock != "on-demand" or account.uid in (0, os.geteuid()) or config.gid in account.groups:
        return []
    never = "so `gpuward lock run` never gets it the GPU (exit 77)"
    if config.group is None:
        return [f"user: no `group` is set, {never}; set `group` to a group of {account.name}"]
    return [
        f"user: {account.name} is not in group {config.group}, {never}; `usermod -aG {config.group} {account.name}`"
    ]


def _exists(service: Service | Sidecar) -> bool:
    program = service.command[0]
    if "/" in program:  # execvpe(3): a relative one counts from cwd
        return shutil.which(str(service.cwd / program)) is not None
    return shutil.which(program, path=service.env.get("PATH", DEFAULT_PATH)) is not None


def _waiting_for_ever(config: Config) -> list[str]:
    found = []
    for index in config.gpu_indexes:
        users = [name for name, service in config.services.items() if service.gpu == index]
        lifetime = [name for name in users if config.services[name].lock == "lifetime"]
        if len(lifetime) > 1:
            names = ", ".join(lifetime)
            found.append(f"gpu {index}: {names} all hold its lock for life, so all but one wait for ever")
        elif lifetime and len(users) > 1:
            others = ", ".join(name for name in users if name not in lifetime)
            found.append(f"gpu {index}: {lifetime[0]} holds its lock for life, so the jobs of {others} are always busy")
    return found
