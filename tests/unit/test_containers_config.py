"""What may be configured of a container, what is made of it, and what an engine's answers mean. No engine here."""

import json
import os
from pathlib import Path

import pytest

from supervisor.config import engines, options
from supervisor.config.accounts import Account
from supervisor.config.elsewhere import lives_elsewhere
from supervisor.config.service import Container
from supervisor.gpu.driver import GpuFacts, GpuVerdict
from supervisor.service import container
from tests.unit.config_samples import SMALL, loaded, one_problem

BOX = "container: {runtime: docker, image: 'registry.example:5000/vllm:0.9', args: [--port, 8000], options: [--init]}"
DOCKER = Container(runtime="docker", image="box", args=("serve", "--port=1"), options=("--network=host",))
PODMAN = Container.model_construct(**(DOCKER.model_dump() | {"runtime": "podman"}))
GPU = GpuFacts("GPU-1234", 0, 3, Path("/dev/nvidia3"), GpuVerdict.HEALTHY, frozenset(), persistence=True)
PLACE = container.Place(
    "box", "n1", Path("/run/gpuward"), "/gpuward", 7, Account("trainer", 1001, 1002, (1002, 44), "/home/trainer"), GPU
)


def changed(text: str) -> str:
    return SMALL.replace("command: [sleep, 60]", text)


def test_a_container_stands_in_place_of_a_command(tmp_path: Path) -> None:
    service = loaded(tmp_path, changed(BOX)).services["trainer"]
    assert service.container is not None
    assert service.container.args == ("--port", "8000")
    assert (service.program, service.command) == ("registry.example:5000/vllm:0.9", ("docker",))


def test_a_command_beside_a_container_is_refused(tmp_path: Path) -> None:
    problem = one_problem(tmp_path, SMALL.replace("command: [sleep, 60]", f"command: [sleep, 60]\n    {BOX}"))
    assert (problem.path, problem.found) == ("services.trainer.command", "both")


@pytest.mark.parametrize(
    ("old", "new", "path"),
    [
        ("runtime: docker", "runtime: lxc", "container.runtime"),
        ("registry.example:5000/vllm:0.9", "--privileged", "container.image"),
        ("[--init]", "[--privileged]", "container.options"),
        ("[--init]", "[--init, word]", "container.options"),
        ("lock: lifetime", "lock: on-demand", "lock"),
        ("lock: lifetime", 'lock: lifetime\n    env: {A: "two\\nlines"}', "env"),
    ],
)
def test_what_a_container_cannot_have_is_refused_at_its_path(tmp_path: Path, old: str, new: str, path: str) -> None:
    assert one_problem(tmp_path, changed(BOX).replace(old, new)).path == f"services.trainer.{path}"


def test_no_argument_or_option_of_a_container_is_shown(tmp_path: Path) -> None:
    secret = changed(BOX).replace("[--init]", "['--token hunter2']").replace("[--port, 8000]", "[[hunter2]]")
    with pytest.raises(Exception, match=r"services\.trainer\.container") as error:
        loaded(tmp_path, secret)
    assert "hunter2" not in str(error.value)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may use podman here")
def test_podman_is_a_runtime_too(tmp_path: Path) -> None:
    assert loaded(tmp_path, changed(BOX).replace("docker", "podman")).services["trainer"].command == ("podman",)


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ("--cgroup-parent=/x", "outside the service's cgroup"),
        ("--cgroups=disabled", "outside the service's cgroup"),
        ("--detach", "nobody else"),
        ("-d", "nobody else"),
        ("--name=x", "nobody else"),
        ("--rm", "nobody else"),
        ("--restart=always", "nobody else"),
        ("--gpus=all", "its UUID"),
        ("--device=nvidia.com/gpu=all", "its UUID"),
        ("--device=/dev/nvidia0", "its UUID"),
        ("--pid=host", "could leave"),
        ("--privileged", "could leave"),
        ("--PRIVILEGED=true", "could leave"),
        ("--env=TOKEN=hunter2", "env_file"),
        ("-e", "env_file"),
        ("--user=0", "`user`"),
        ("--volume=/var/run/docker.sock:/s", "could leave"),
        ("--mount=type=bind,source=/run/gpuward/keeper-control.sock,target=/s", "could leave"),
        ("--label=gpuward.node=x", "gpuward's"),
        ("--no-such-option", "known here"),
        ("-v", "long name"),
        ("8000:8000", "one word"),
        ("--volume /models:/models", "one word"),
    ],
)
def test_an_option_that_would_break_a_guarantee_is_refused_with_the_reason(option: str, reason: str) -> None:
    found = options.trouble(option)
    assert found is not None
    assert reason in found[1]
    assert "hunter2" not in "".join(found)


@pytest.mark.parametrize(
    "option",
    ["--volume=/models:/models:ro", "--publish=8000:8000", "--shm-size=8g", "--ipc=host", "--init", "--label=a=b"],
)
def test_an_option_that_leaves_the_guarantees_alone_is_taken(option: str) -> None:
    assert options.trouble(option) is None


@pytest.mark.parametrize(
    ("command", "program"),
    [
        (["docker", "run", "x"], "docker"),
        (["/usr/bin/docker", "compose", "up"], "docker"),
        (["docker-compose", "up"], "docker-compose"),
        (["nerdctl", "run", "x"], "nerdctl"),
        (["sudo", "-E", "docker", "run", "x"], "docker"),
        (["env", "A=1", "podman", "--log-level=debug", "run", "x"], "podman"),
        (["timeout", "60", "systemctl", "start", "x"], "systemctl"),
        (["sh", "-c", "A=1 exec docker run x"], "docker"),
        (["bash", "-ec", "cd /x && docker compose up"], "docker"),
        (["sh", "-c", "if true; then\nsystemd-run x; fi"], None),
        (["sh", "-c", "cd /x; exec systemd-run --scope x"], "systemd-run"),
        (["sh", "-c", "systemctl start x && exec ./serve"], None),
        (["sh", "-c", "docker rm -f x; exec ./serve"], None),
        (["sh", "-c", "echo 'docker run x'; exec ./serve"], None),
        (["sh", "-c", "it's \"broken"], None),
        (["sh", "./docker", "run"], None),
        (["sh", "-c"], None),
        (["env"], None),
        (["python", "-m", "docker", "run"], None),
    ],
)
def test_a_command_whose_processes_live_elsewhere_is_told_where_it_is_certain(
    command: list[str], program: str | None
) -> None:
    found = lives_elsewhere(command)
    assert (None if found is None else found[0]) == program
    if program in {"docker", "podman", "nerdctl"}:
        assert found is not None
        assert "use `container:`" in found[1]


def test_docker_is_asked_for_a_container_below_the_services_cgroup() -> None:
    words = container.run_words(DOCKER, PLACE, Path("/work"))
    assert words[-4:] == ["--network=host", "box", "serve", "--port=1"]
    assert "--cgroup-parent=/gpuward/term-7/box" in words
    assert {"--name=gpuward-box", "--rm", "--restart=no", "--pull=never", "--log-driver=none"} <= set(words)
    assert {"--user=1001:1002", "--group-add=44", "--workdir=/work", "--gpus=device=GPU-1234"} <= set(words)
    assert {f"--label={k}={v}" for k, v in PLACE.labels.items()} <= set(words)
    assert any("/gpuward/term-7/box/gate," in word for word in words)
    assert not any(word.startswith("--workdir") for word in container.run_words(DOCKER, PLACE, None))


def test_podman_is_asked_to_stay_where_it_is_and_for_the_gpu_by_cdi() -> None:
    words = container.run_words(PODMAN, PLACE, None)
    assert {"--cgroups=split", "--device=nvidia.com/gpu=GPU-1234", "--restart=no"} <= set(words)
    assert not any("cgroup-parent" in word for word in words)


def test_a_container_is_ours_by_node_run_folder_and_service_only() -> None:
    labels = PLACE.labels
    assert container.is_ours({"Config": {"Labels": labels | {"more": "x"}}}, labels)
    for key in labels:
        assert not container.is_ours({"Config": {"Labels": labels | {key: "another"}}}, labels)
    assert not container.is_ours({"Config": {"Labels": None}}, labels)


def test_variables_go_into_a_closed_file_and_a_value_of_two_lines_is_refused_by_name(tmp_path: Path) -> None:
    file = container.env_file(tmp_path, "box")
    container.write_env_file(file, {"A": "'quoted' # x", "B": ""})
    assert file.read_text() == "A='quoted' # x\nB=\n"
    assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    with pytest.raises(container.ContainerError, match="of C has") as error:
        container.write_env_file(file, {"C": "hunter2\nB=1"})
    assert "hunter2" not in str(error.value)


def test_only_a_client_that_started_nothing_is_quoted(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("Error: of before\n")
    since = log.stat().st_size
    assert container.failure_said(125 << 8, log, since) is None
    log.write_text(
        "Error: of before\ndocker: Error response from daemon: No such image: x.\nSee 'docker run --help'.\n"
    )
    assert container.failure_said(125 << 8, log, since) == "docker: Error response from daemon: No such image: x."
    assert container.failure_said(1 << 8, log, since) is None
    assert container.failure_said(9, log, since) is None
    assert container.failure_said(None, log, since) is None


@pytest.mark.parametrize(
    ("output", "said", "lasting"),
    [
        ({"CgroupDriver": "cgroupfs", "SecurityOptions": ["name=seccomp,profile=default"]}, None, False),
        ({"CgroupDriver": "systemd"}, "native.cgroupdriver=cgroupfs", True),
        ({"CgroupDriver": "none"}, "is none", True),
        ({"CgroupDriver": "cgroupfs", "SecurityOptions": ["name=rootless"]}, "rootless", True),
        ({"ServerErrors": ["Cannot connect to the Docker daemon"]}, "Cannot connect", False),
        ({"CgroupDriver": ""}, "cannot be asked: down", False),
        ([], "cannot be asked: down", False),
    ],
)
def test_an_engine_that_cannot_hold_a_container_is_told_with_advice(
    output: object, said: str | None, lasting: bool
) -> None:
    found = engines.verdict(DOCKER, json.dumps(output), "first\ndown\n")
    if said is None:
        assert found is None
    else:
        assert found is not None
        assert said in found.why
        assert found.lasting is lasting


def test_podman_needs_a_unified_hierarchy() -> None:
    assert engines.verdict(PODMAN, json.dumps({"host": {"cgroupVersion": "v2"}}), "") is None
    found = engines.verdict(PODMAN, json.dumps({"host": {"cgroupVersion": "v1"}}), "")
    assert found is not None
    assert found.lasting
    found = engines.verdict(PODMAN, "", "Error: no storage")
    assert found is not None
    assert not found.lasting
