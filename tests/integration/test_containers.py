"""Services that are containers, on a real Docker engine and a real podman (tests.bed.docker)."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import yaml

from supervisor import proc
from supervisor.cgroup import Group, mount_point
from supervisor.config.accounts import account
from supervisor.config.service import Container, Service
from supervisor.keeper import client
from supervisor.keeper.places import GATE, CgroupPlaces
from supervisor.service import container
from supervisor.service.states import State
from tests.bed.docker import IMAGE, ROOT, VIEWS, Engine, engine_in, podman_client, remove_v1, script, view_words
from tests.bed.keeper import Bed, bed_around, soon, until
from tests.bed.nodes import NodeBed, gone
from tests.bed.services import node_on

NAME = "gpuward-box"
SLEEP = ("sh", "-c", "exec sleep 600")
MAIN = VIEWS[0]
Start = Callable[[str], "Node"]


class Node(NodeBed):
    """A node in one of the views of this machine."""

    words: tuple[str, ...] = ()

    def start(self) -> "Node":
        path = self.folder / "gpuward.yml"
        path.write_text(yaml.safe_dump(self.config))
        command = [*self.words, sys.executable, "-m", "supervisor.entry", "run", "--config", str(path)]
        with (self.folder / "out").open("ab") as output:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        return self

    def add(self, name: str, *args: str, client: Path, socket: Path | None = None, **keys: Any) -> None:
        """A service that is a container."""
        own = {"options": ["--network=none", *keys.pop("options", ())], "args": list(args), "image": IMAGE}
        kind = {"runtime": "docker", "socket": str(socket)} if socket else {"runtime": "podman"}
        quick = {"user": "root", "ready_after": "200ms", "stop_timeout": "5s", "restart": {"backoff": ["300ms"] * 9}}
        self.config["services"][name] = {"container": kind | own | {"program": str(client)}} | quick | keys

    def check(self) -> tuple[int, str]:
        """What check-config says."""
        path = self.folder / "gpuward.yml"
        path.write_text(yaml.safe_dump(self.config))
        words = [sys.executable, "-m", "supervisor.entry", "check-config", "--config", str(path)]
        done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)
        return done.returncode, done.stdout + done.stderr

    def row(self, name: str = "box") -> dict[str, Any]:
        rows = (self.status() or {"services": []})["services"]
        return next((row for row in rows if row["name"] == name), {"state": "unknown", "why": "", "pid": None})

    def why(self, name: str, state: str) -> str:
        """The reason of this state, once it is in it: both out of one answer, since a pause is short."""

        def look() -> str | None:
            row = self.row(name)
            return str(row["why"]) if row["state"] == state else None

        return self.until(look, 20)

    def log(self, name: str = "box") -> str:
        path = self.folder / "log" / f"{name}.log"
        return path.read_text() if path.exists() else ""

    def command(self, *words: str) -> None:
        """A command of an operator."""
        gpuward = [sys.executable, "-m", "supervisor.entry"]
        subprocess.run([*gpuward, "service", *words, "--run-dir", str(self.run)], check=True, timeout=30)


@pytest.fixture(scope="module")
def engines() -> Iterator[Callable[[str], Engine]]:
    """The engine of a view, made when it is first asked for."""
    with contextlib.ExitStack() as stack:
        made: dict[str, Engine] = {}

        def get(view: str) -> Engine:
            if view not in made:
                made[view] = stack.enter_context(engine_in(view))
            made[view].start()
            return made[view]

        yield get


@pytest.fixture(params=VIEWS)
def engine(request: pytest.FixtureRequest, engines: Callable[[str], Engine]) -> Engine:
    return engines(request.param)


@pytest.fixture
def one_engine(engines: Callable[[str], Engine]) -> Engine:
    """In this machine as it is."""
    return engines(MAIN)


@pytest.fixture
def make(tmp_path: Path, own_cgroup: str) -> Iterator[Start]:
    made: list[Node] = []

    def start(view: str) -> Node:
        node = Node(tmp_path / "n1", own_cgroup, "n1")
        node.words = view_words(view)
        made.append(node)
        return node

    yield start
    for node in made:
        node.end()
    remove_v1(own_cgroup)


def cgroup_of(pid: int) -> str:
    return proc.cgroup_path(pid) or ""


def service_cgroup(node: Node) -> str:
    """Of the service `box` in the present term."""
    token = (node.status() or {})["term"]["token"]
    return f"{node.cgroup}/n1/term-{token}/box"


def said(node: Node) -> list[str]:
    """Lines of the log, without what a shell says of a child of its that was asked to end as well."""
    return [line for line in node.log().splitlines() if line != "Terminated"]


def environ(pid: int) -> dict[str, str]:
    words = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(word.split("=", 1) for word in words if "=" in word)


def arguments() -> str:
    """The command lines of all processes of this machine."""
    texts = []
    for pid in proc.all_pids():
        with contextlib.suppress(OSError):
            texts.append(Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace"))
    return "\n".join(texts)


def test_a_container_is_a_service_with_its_cgroup_user_variables_gpu_and_an_end(
    engine: Engine, make: Start, tmp_path: Path
) -> None:
    node = make(engine.view)
    (tmp_path / "secrets").write_text('TOKEN="no quotes are lost" # nor this\nLD_PRELOAD=/for/the/container.so\n')
    text = f"""exec 7<{node.folder}/gpu/nvidia0; trap 'echo asked; sleep 0.3; echo gone; exit 0' TERM
        echo up; while :; do sleep 0.05; done"""
    node.add(
        "box", "sh", "-c", text, client=engine.client, socket=engine.socket, gpu=0, lock="lifetime", user="nobody",
        env={"MODEL": "llama", "PATH": "/bin"}, env_file=str(tmp_path / "secrets"),
        options=["--volume=/usr:/host:ro"], cwd="/host", start_grace="1s", priority=1,
    )  # fmt: skip
    node.add("next", *SLEEP, client=engine.client, socket=engine.socket, gpu=0, lock="lifetime", gpu_fd="optional")
    node.after_an_orderly_end().start()
    node.until(lambda: node.row()["state"] == "running")
    began = time.monotonic()
    found = engine.inspect(NAME)
    pid, home = found["State"]["Pid"], service_cgroup(node)
    assert cgroup_of(pid) == f"{home}/{found['Id']}"
    assert cgroup_of(node.row()["pid"]) == f"{home}/main"
    env = environ(pid)
    assert (env["TOKEN"], env["LD_PRELOAD"]) == ('"no quotes are lost" # nor this', "/for/the/container.so")
    assert (env["MODEL"], env["GPUWARD_SERVICE"], env["GPUWARD_FENCING_TOKEN"]) == (
        "llama",
        "box",
        home.split("/")[-2][5:],
    )
    assert env["CUDA_VISIBLE_DEVICES"].startswith("GPU-")
    assert (Path(f"/proc/{pid}/cwd").stat().st_ino, os.stat(f"/proc/{pid}").st_uid) == (
        os.stat("/usr").st_ino,
        account("nobody").uid,
    )
    assert "no quotes" not in arguments()
    assert "LD_PRELOAD" not in environ(node.row()["pid"])
    assert not container.env_file(node.run, "box").exists()
    assert found["HostConfig"]["RestartPolicy"]["Name"] == "no"
    node.until(lambda: "up" in node.log())
    time.sleep(max(0.0, began + 2.5 - time.monotonic()))  # rounds of the watchdog, for which the device counts by now
    assert (node.row()["state"], node.row()["lock"], node.row()["restarts"]) == ("running", "held", 0)
    assert node.row("next")["state"] == "waiting-lock"
    assert engine.containers() == [NAME]
    node.command("stop", "box", "--wait")
    # Once: Docker's client would have passed a SIGTERM of its own on to the container.
    assert said(node) == ["up", "asked", "gone"]
    node.until(lambda: node.row("next")["state"] == "running" and engine.containers() == ["gpuward-next"])


NOTIFYING = """
import time
from supervisor.notify import heartbeat, ready
ready()
while True:
    heartbeat()
    time.sleep(0.2)
"""


def python_options() -> list[str]:
    """This test's Python, inside."""
    paths = {"/usr", "/lib", "/lib64", sys.base_prefix, str(ROOT)}
    return [f"--volume={path}:{path}:ro" for path in sorted(paths) if os.path.exists(path)]


def test_a_container_outlives_its_supervisor_and_its_keeper_and_is_heard_by_the_next(
    one_engine: Engine, make: Start
) -> None:
    node = make(MAIN)
    python = os.path.realpath(sys.executable)
    node.add(
        "box", python, "-c", NOTIFYING, client=one_engine.client, socket=one_engine.socket, options=python_options(),
        readiness={"notify": True, "timeout": "20s"}, heartbeat="1s",
        env={"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
    )  # fmt: skip
    node.config["election"]["ttl"] = 20  # time for two interpreters to start on a busy machine
    node.after_an_orderly_end().start()
    status = node.until_leading()
    pid = one_engine.pid(NAME)
    os.kill(status["keeper"]["pid"], signal.SIGKILL)
    node.kill()
    node.start().until_leading()
    assert "adopted" in node.output()
    time.sleep(3)  # longer than the heartbeat and the two looks that would see it missed
    assert (one_engine.pid(NAME), node.row()["state"], node.row()["restarts"]) == (pid, "running", 0)
    assert not gone(pid)
    node.lose_the_lock()
    node.until(lambda: gone(pid))


@pytest_asyncio.fixture
async def viewed_keeper(engine: Engine, tmp_path: Path, own_cgroup: str) -> AsyncIterator[tuple[Engine, Bed]]:
    """A keeper in the same view as an engine."""
    async with bed_around(tmp_path, own_cgroup, lambda: _spawn(tmp_path, own_cgroup, engine.view)) as bed:
        yield engine, bed
    remove_v1(own_cgroup)


async def _spawn(run: Path, cgroup: str, view: str) -> client.KeeperClient:
    program = str(Path(client.__file__).with_name("__main__.py"))
    words = [*view_words(view), sys.executable, "-I", "-S", program, "--run", str(run), "--cgroup", cgroup, "--detach"]
    with (run / "keeper.log").open("wb") as log:
        starter = await asyncio.create_subprocess_exec(*words, stderr=log, start_new_session=True)
        assert await starter.wait() == 0, (run / "keeper.log").read_text()
    return await client.KeeperClient.connect(run)


async def test_an_engine_that_is_late_starts_nothing_after_the_term_or_after_a_kill(
    viewed_keeper: tuple[Engine, Bed], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runtime has been called, and hangs, while the keeper ends the term, or the service alone."""
    engine, bed = viewed_keeper
    mount = "/sys/fs/cgroup" if engine.view == "unified" else mount_point()
    monkeypatch.setattr(container, "mount_point", lambda: mount)
    spec = Container(runtime="docker", image=IMAGE, args=("sh", "-c", "echo escaped; exec sleep 600"))
    words = [str(engine.client), "--host", f"unix://{engine.socket}"]
    for token, how in ((1, "kill"), (2, "switch")):
        marker = f"late-{how}"
        place = container.Place(marker, "n1", bed.run, str(bed.cgroup), token, account("root"), None)
        container.write_env_file(container.env_file(bed.run, marker), {})
        command = container.run_words(spec, place, None)
        command.insert(1, "--network=none")
        engine.hold.touch()
        await bed.arm(token, 30.0)
        await bed.start(token, marker, *words, *command)
        await until(lambda: engine.held.exists() or None, "the runtime is called", 10.0)
        if how == "kill":
            await bed.call("kill", service=marker)
            await bed.event("empty", service=marker)
        else:
            await bed.call("end", token=token, by_ns=int(soon(2) * 1e9))
        engine.hold.unlink()
        await until(lambda: not engine.held.exists() or None, "the runtime goes on", 10.0)
        await asyncio.to_thread(_until_failed, engine, container.container_name(marker))
        assert "escaped" not in (bed.run / f"{marker}.log").read_text()
        if how == "kill":
            await bed.call("end", token=token, by_ns=int(soon(2) * 1e9))
    await asyncio.to_thread(_tidy, str(bed.cgroup), engine.view)


def _tidy(cgroup: str, view: str) -> None:
    """In the hierarchies of v1 runc leaves the folders above a container's: the next term's start removes them."""
    assert bool(list(Path("/sys/fs/cgroup").glob(f"*{cgroup}/term-*"))) == (view == "hybrid")
    container.tidy_v1(cgroup, 3)
    assert not list(Path("/sys/fs/cgroup").glob(f"*{cgroup}/term-*"))


def test_the_kill_of_a_term_shuts_every_gate_before_anything_is_removed(own_cgroup: str) -> None:
    """Something unkillable keeps a term's cgroups where they are."""
    places = CgroupPlaces(Group.open(own_cgroup, make=True))
    term = places.open_term(1)
    gate = Path(f"{mount_point()}{term.service('box').cgroup}/{GATE}")
    assert gate.is_dir()
    term.kill()
    assert not gate.exists()
    assert gate.parent.is_dir()
    assert term.discard()


def _until_failed(engine: Engine, name: str) -> None:
    """Until the engine has given the container up: removed it, or left it without a process."""
    end = time.monotonic() + 10
    while name in engine.containers():
        state = json.loads(engine.ask("container", "inspect", name, check=False).stdout or b"[]")
        running = state and state[0]["State"]["Running"]
        assert not running, f"{name} runs in {cgroup_of(state[0]['State']['Pid'])}"
        if state and state[0]["State"]["ExitCode"]:
            break
        assert time.monotonic() < end, state
        time.sleep(0.1)


def test_what_an_earlier_run_left_is_removed_and_a_strangers_container_is_left_alone(
    one_engine: Engine, make: Start
) -> None:
    node = make(MAIN)
    detached = ["run", "--detach", "--network=none"]
    labels = [f"--label={key}={value}" for key, value in container.own_labels("box", "n1", node.run).items()]
    one_engine.ask(*detached, "--name", NAME, *labels, IMAGE, *SLEEP)
    other = [*labels[:-1], "--label=gpuward.run=/another"]
    one_engine.ask(*detached, "--name", "gpuward-strange", *other, IMAGE, *SLEEP)
    left, strange = one_engine.pid(NAME), one_engine.pid("gpuward-strange")
    for name in ("box", "strange", "missing"):
        node.add(name, *SLEEP, client=one_engine.client, socket=one_engine.socket)
    node.config["services"]["missing"]["container"]["image"] = "no-such-image"
    node.after_an_orderly_end().start()
    node.until(lambda: node.row()["state"] == "running", 15)
    assert gone(left)
    assert one_engine.pid(NAME) != left
    why = node.why("strange", "backoff")
    assert "gpuward-strange" in why
    assert "left alone" in why
    why = node.why("missing", "backoff")
    assert "No such image" in why
    assert not gone(strange)
    one_engine.ask("rm", "--force", "gpuward-strange")


def test_a_container_ends_with_its_engine_and_runs_once_when_the_engine_is_back(
    one_engine: Engine, make: Start
) -> None:
    node = make(MAIN)
    node.add("box", *SLEEP, client=one_engine.client, socket=one_engine.socket)
    node.after_an_orderly_end().start().until_leading()
    first = one_engine.pid(NAME)
    one_engine.kill()
    node.until(lambda: gone(first))
    why = node.why("box", "backoff")
    assert "the Docker engine cannot be asked" in why
    one_engine.start()
    node.until(lambda: node.row()["state"] == "running", 15)
    second = one_engine.pid(NAME)
    assert cgroup_of(second).startswith(f"{service_cgroup(node)}/")
    assert one_engine.containers() == [NAME]


def test_a_container_that_an_engine_puts_elsewhere_is_ended_and_fails_its_service(
    one_engine: Engine, make: Start, tmp_path: Path
) -> None:
    deaf = f"""for word; do shift; case $word in --cgroup-parent=*) ;; *) set -- "$@" "$word" ;; esac; done
exec {one_engine.client} "$@\""""
    node = make(MAIN)
    node.add("box", *SLEEP, client=script(tmp_path / "deaf", deaf), socket=one_engine.socket)
    node.config["services"]["box"]["restart"] = {"backoff": ["60s"]}
    node.after_an_orderly_end().start()
    why = node.why("box", "backoff")
    assert f"was started in the cgroup {one_engine.elsewhere}/" in why
    assert not one_engine.containers()


async def test_a_stop_waits_for_no_engine(one_engine: Engine, keeper: Bed) -> None:
    spec = Service(
        container=Container(
            runtime="docker", image=IMAGE, args=SLEEP, program=one_engine.client, socket=one_engine.socket
        ),
        user=os.geteuid(),
    )
    async with node_on(keeper, box=spec) as node:
        one_engine.signal(signal.SIGSTOP)
        try:
            await node.arm(1)
            launching = asyncio.create_task(node.services.launch(1, deadline=soon()))
            await node.state("box", State.STARTING)
            began = time.monotonic()
            await node.services.stop_all(by=soon(0), graceful=True)
            assert node.row("box")["state"] == "stopped"
            assert time.monotonic() - began < 1
            await launching
        finally:
            one_engine.signal(signal.SIGCONT)


def test_check_config_says_what_is_wrong_with_an_engine_or_an_image(
    one_engine: Engine, make: Start, tmp_path: Path
) -> None:
    node = make(MAIN)
    systemd = script(tmp_path / "systemd", """echo '{"CgroupDriver": "systemd"}'""")
    node.add("well", *SLEEP, client=one_engine.client, socket=one_engine.socket)
    node.add("down", *SLEEP, client=one_engine.client, socket=tmp_path / "no.sock")
    node.add("image", *SLEEP, client=one_engine.client, socket=one_engine.socket)
    node.config["services"]["image"]["container"]["image"] = "no-such-image"
    code, text = node.check()
    assert code == 0
    assert "services.down.container: the Docker engine cannot be asked" in text
    assert "`docker pull no-such-image`" in text
    assert "services.well.container" not in text
    node.add("other", *SLEEP, client=systemd, socket=one_engine.socket)
    code, text = node.check()
    assert code == 78
    assert "services.other.container" in text
    assert "native.cgroupdriver=cgroupfs" in text


@pytest.fixture
def podman() -> Iterator[Path]:
    with podman_client() as client:
        yield client


def test_podman_runs_a_container_within_the_cgroup_of_its_service(podman: Path, make: Start) -> None:
    node = make("unified")
    text = "trap 'echo asked; exit 0' TERM; echo up $MODEL; while :; do sleep 0.05; done"
    node.add("box", "sh", "-c", text, client=podman, env={"MODEL": "llama"})
    node.after_an_orderly_end().start().until_leading(30)

    def inside() -> int | None:
        home = f"{service_cgroup(node)}/main/"
        live = [pid for pid, stat in proc.snapshot().items() if stat.comm == "sh" and stat.state not in "ZX"]
        shells = [pid for pid in live if cgroup_of(pid).startswith(home)]
        return shells[0] if shells else None

    first = node.until(inside)
    node.until(lambda: "up llama" in node.log())
    found = node.row()["pid"]
    os.kill(found, signal.SIGKILL)  # the client alone: podman's own clean-up never comes to run
    node.until(lambda: gone(first))
    second = node.until(lambda: inside() if node.row()["state"] == "running" else None, 20)
    assert second != first
    assert "left alone" not in node.output()
    began = time.monotonic()
    node.command("stop", "box", "--wait")
    assert time.monotonic() - began < 5, "its client has not ended with it"
    assert said(node) == ["up llama", "up llama", "asked"]
    assert gone(second)
