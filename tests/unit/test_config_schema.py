import os
import pwd
import re
from pathlib import Path
from typing import Any, get_args

import pytest

from election.stores.etcd_access import Access
from supervisor.config.loading import load, warnings
from supervisor.config.schema import Config
from tests.unit.config_samples import SMALL, loaded, one_problem, problems

EXAMPLES = Path(__file__).parents[2] / "examples"
ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root may name other users")


def test_a_small_configuration_gets_the_documented_defaults(tmp_path: Path) -> None:
    config = loaded(tmp_path, SMALL)
    assert config.election.timing.ttl == 90
    assert config.status_url == "http://127.0.0.1:8009"
    assert config.lock_file(0) == Path("/run/gpuward/gpu-0.lock")
    assert config.cgroup == "gpuward"
    assert (config.api.host, config.api.port) == ("127.0.0.1", 8009)
    assert config.services["trainer"].restart.backoff == (30.0, 60.0, 120.0)
    assert config.services["trainer"].account.uid == os.geteuid()


def test_the_lock_files_follow_the_run_folder_unless_they_are_named(tmp_path: Path) -> None:
    assert loaded(tmp_path, SMALL + "paths: {run: /run/b}\n").lock_file(0) == Path("/run/b/gpu-0.lock")
    own = SMALL.replace("driver: simulated", "driver: simulated\n  lock_file: /var/run/rinet-gpu.lock")
    assert loaded(tmp_path, own).lock_file(0) == Path("/var/run/rinet-gpu.lock")


def test_two_gpus_never_share_a_lock_file(tmp_path: Path) -> None:
    text = SMALL.replace("driver: simulated", "driver: simulated\n  simulated: {count: 2}\n  lock_file: /run/gpu.lock")
    problem = one_problem(tmp_path, text)
    assert (problem.path, problem.line) == ("gpu.lock_file", 8)
    assert "{index}" in problem.expected


def test_the_node_is_named_after_the_host_where_the_file_does_not_say(tmp_path: Path) -> None:
    config = loaded(tmp_path, SMALL.replace("node: gpu1\n", ""))
    assert config.node == os.uname().nodename.partition(".")[0].lower()


@pytest.mark.parametrize(
    ("written", "seconds"),
    [("500ms", 0.5), ("60s", 60), ("5m", 300), ("4h", 14400), ("1.5s", 1.5), ("90", 90), ("0.25", 0.25), ("2e1", 20)],
)
def test_durations_are_read_with_and_without_a_unit(tmp_path: Path, written: str, seconds: float) -> None:
    assert loaded(tmp_path, SMALL + f"    stop_timeout: {written}\n").services["trainer"].stop_timeout == seconds


@pytest.mark.parametrize(
    "written", ["-1s", "-5", "5 m", "5d", "1:30", "s", ".inf", "9e99", "true", "[1]", '"60"', "²s"]
)
def test_other_texts_are_no_durations(tmp_path: Path, written: str) -> None:
    problem = one_problem(tmp_path, SMALL + f"    stop_timeout: {written}\n")
    assert (problem.path, problem.line) == ("services.trainer.stop_timeout", 13)
    assert "500ms, 60s, 5m or 4h" in problem.expected


@pytest.mark.parametrize(
    ("old", "new", "path"),
    [
        ("cluster: prod", "cluster: Prod", "cluster"),
        ("node: gpu1", "node: gpu_1", "node"),
        ("node: gpu1", "node: gpu1\nurl: http://me:secret@gpu1", "url"),
        ("node: gpu1", "node: gpu1\nurl: gpu1:8009", "url"),
        ("node: gpu1", "node: gpu1\npaths: {run: run/gpuward}", "paths.run"),
        ("node: gpu1", f"node: gpu1\npaths: {{run: /{'x' * 90}}}", "paths.run"),
        ("node: gpu1", "node: gpu1\ngroup: no-such-group", "group"),
        ("node: gpu1", "node: gpu1\ncgroup: /gpuward", "cgroup"),
        ("node: gpu1", "node: gpu1\ncgroup: a/../b", "cgroup"),
        ("node: gpu1", "node: gpu1\napi: {listen: 0.0.0.0:8009}", "api.listen"),
        ("node: gpu1", "node: gpu1\napi: {listen: 127.0.0.1:0}", "api.listen"),
        ("node: gpu1", "node: gpu1\napi: {listen: 127.0.0.1}", "api.listen"),
        ("node: gpu1", "node: gpu1\nwatchdog: {interval: 0}", "watchdog.interval"),
        ("node: gpu1", "node: gpu1\nwatchdog: {interval: 2s, confirm: 3s}", "watchdog.confirm"),
        ("node: gpu1", "node: gpu1\nallow_weak_containment: 1", "allow_weak_containment"),
        ("store: local", "store: local\n  ttl: 5", "election.ttl"),
        ("store: local", "store: local\n  ttl: 90.0", "election.ttl"),
        ("store: local", "store: local\n  ttl: true", "election.ttl"),
        ("store: local", "store: local\n  clock_error: 0.2", "election.clock_error"),
        ("store: local", "store: zookeeper", "election.store"),
        ("store: local", "store: etcd", "election.etcd"),
        ("store: local", "store: etcd\n  etcd: {endpoints: []}", "election.etcd.endpoints"),
        ("store: local", "store: etcd\n  etcd: {endpoints: ['http://u:p@h:2379']}", "election.etcd.endpoints.0"),
        ("driver: simulated", "driver: nvidia", "gpu.driver"),
        ("[sleep, 60]", "sleep 60", "services.trainer.command"),
        ("[sleep, 60]", "[]", "services.trainer.command"),
        ("[sleep, 60]", "['']", "services.trainer.command"),
        ("[sleep, 60]", "[docker, run, x]", "services.trainer.command"),
        ("[sleep, 60]", "[/usr/bin/podman, run, x]", "services.trainer.command"),
        ("[sleep, 60]", "[systemctl, start, x]", "services.trainer.command"),
        ("[sleep, 60]", "[systemd-run, x]", "services.trainer.command"),
        ("gpu: 0", "gpu: 1", "services.trainer.gpu"),
        ("gpu: 0", "gpu: -1", "services.trainer.gpu"),
        ("gpu: 0", "cwd: /", "services.trainer.lock"),
        ("lock: lifetime", "cwd: /", "services.trainer.lock"),
        ("lock: lifetime", "lock: always", "services.trainer.lock"),
        ("lock: lifetime", "lock: lifetime\n    env: {GPUWARD_NODE: x}", "services.trainer.env"),
        ("lock: lifetime", "lock: lifetime\n    env: {CUDA_VISIBLE_DEVICES: x}", "services.trainer.gpu"),
        ("lock: lifetime", "lock: lifetime\n    env: {A B: x}", "services.trainer.env"),
        ("lock: lifetime", "lock: lifetime\n    restart: {backoff: []}", "services.trainer.restart.backoff"),
        ("gpu: 0\n    lock: lifetime", "gpu_fd: required", "services.trainer.gpu_fd"),
        ("  trainer:", "  Trainer:", "services.Trainer"),
    ],
)
def test_a_wrong_value_is_refused_at_its_path(tmp_path: Path, old: str, new: str, path: str) -> None:
    assert old in SMALL
    assert one_problem(tmp_path, SMALL.replace(old, new, 1)).path == path


def test_times_that_do_not_add_up_are_refused_with_the_sum(tmp_path: Path) -> None:
    problem = one_problem(tmp_path, SMALL.replace("store: local", "store: local\n  clock_error: 0.2"))
    assert problem.found == "0.2"
    assert "which must not exceed TTL 90" in problem.hint


def test_a_command_that_lives_outside_the_cgroup_is_refused_with_advice(tmp_path: Path) -> None:
    problem = one_problem(tmp_path, SMALL.replace("[sleep, 60]", "[docker, run, image]"))
    assert problem.found == "docker"
    assert "can neither watch nor end it" in problem.hint


def test_the_nvidia_driver_is_named_as_not_there_yet(tmp_path: Path) -> None:
    problem = one_problem(tmp_path, SMALL.replace("driver: simulated", "driver: nvidia"))
    assert "only the simulated driver" in problem.hint


@pytest.mark.parametrize("user", ["no-such-user", "4000000123", "-1", "99999999999999", "true", '""', '"a\\0b"'])
def test_a_user_that_the_machine_does_not_know_is_refused(tmp_path: Path, user: str) -> None:
    problem = one_problem(tmp_path, SMALL.replace(f"user: {os.geteuid()}", f"user: {user}"))
    assert problem.path == "services.trainer.user"


def test_without_root_only_the_own_user_is_possible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 4000000)
    other = pwd.getpwall()[0].pw_name
    problem = one_problem(tmp_path, re.sub("user: .*", f"user: {other}", SMALL))
    assert "uid 4000000" in problem.expected
    assert loaded(tmp_path, re.sub("user: .*", "user: 4000000", SMALL)).services["trainer"].account.uid == 4000000


@ROOT
def test_a_service_of_root_is_warned_of(tmp_path: Path) -> None:
    assert any(
        "trainer.user: root" in text for text in warnings(loaded(tmp_path, SMALL.replace("user: 0", "user: root")))
    )
    config = loaded(tmp_path, SMALL.replace("user: 0", "user: nobody"))
    assert not any("root" in text for text in warnings(config))
    assert config.services["trainer"].account.name == "nobody"


def test_a_lifetime_service_must_have_the_device_open_unless_it_says_otherwise(tmp_path: Path) -> None:
    assert loaded(tmp_path, SMALL).services["trainer"].needs_gpu_fd
    assert not loaded(tmp_path, SMALL + "    gpu_fd: optional\n").services["trainer"].needs_gpu_fd
    demand = SMALL.replace("lifetime", "on-demand")
    assert not loaded(tmp_path, demand).services["trainer"].needs_gpu_fd
    assert loaded(tmp_path, demand + "    gpu_fd: required\n").services["trainer"].needs_gpu_fd


def test_a_lock_that_one_service_would_wait_for_for_ever_is_warned_of(tmp_path: Path) -> None:
    second = SMALL[SMALL.index("    command") :]
    both = warnings(loaded(tmp_path, f"{SMALL}  second:\n{second}"))
    assert any("trainer, second" in text and "wait for ever" in text for text in both)
    mixed = warnings(loaded(tmp_path, f"{SMALL}  second:\n{second.replace('lifetime', 'on-demand')}"))
    assert any("jobs of second are always busy" in text for text in mixed)
    assert not any("gpu 0" in text for text in warnings(loaded(tmp_path, SMALL)))


ETCD = "store: etcd\n  etcd: {{endpoints: ['{scheme}://h:2379'], {keys}}}"


def with_etcd(keys: str, scheme: str = "https") -> str:
    return SMALL.replace("store: local", ETCD.format(scheme=scheme, keys=keys))


@pytest.mark.parametrize(
    ("keys", "scheme", "path", "part"),
    [
        ("ca_file: ca.crt", "https", "ca_file", "an absolute path"),
        ("password_file: secret, user: u", "https", "password_file", "an absolute path"),
        ("ca_file: /ca.crt", "http", "ca_file", "https:// in all endpoints"),
        ("cert_file: /a.crt", "https", "key_file", "`cert_file` alone"),
        ("key_file: /a.key", "https", "key_file", "`key_file` alone"),
        ("user: u", "https", "password_file", "`user` alone"),
        ("password_file: /secret", "https", "password_file", "`password_file` alone"),
        ("user: 'u:hunter2', password_file: /secret", "https", "user", "a user's name alone"),
        ("password: hunter2", "https", "password", "a known one"),
        ("quota: 1000", "https", "quota", "1048576 or more"),
    ],
)
def test_what_does_not_go_together_in_the_access_to_etcd_is_refused(
    tmp_path: Path, keys: str, scheme: str, path: str, part: str
) -> None:
    problem = one_problem(tmp_path, with_etcd(keys, scheme))
    assert problem.path == f"election.etcd.{path}"
    assert part in str(problem)
    assert "hunter2" not in str(problem)


def test_https_needs_no_key_and_a_whole_set_of_files_is_handed_on(tmp_path: Path) -> None:
    assert loaded(tmp_path, with_etcd("")).election.etcd is not None
    keys = "ca_file: /c/ca, cert_file: /c/crt, key_file: /c/key, user: u, password_file: /c/secret, quota: 4294967296"
    etcd = loaded(tmp_path, with_etcd(keys)).election.etcd
    assert etcd is not None
    names = ("ca", "crt", "key", "secret")
    ca, cert, key, secret = (Path("/c", name) for name in names)
    assert etcd.access == Access(ca, cert, key, "u", secret)
    assert etcd.quota == 4 << 30


def test_files_for_etcd_that_cannot_be_used_and_a_password_in_the_clear_are_warned_of(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("hunter2\n")
    (tmp_path / "secret").chmod(0o644)
    keys = f"ca_file: {tmp_path}/none, user: u, password_file: {tmp_path}/secret"
    found = " ".join(warnings(loaded(tmp_path, with_etcd(keys))))
    assert f"election.etcd: {tmp_path}/none: as CA it cannot be read: No such file" in found
    assert f"{tmp_path}/secret: found mode 0644, expected 0600 or 0640" in found
    assert "http://" not in found
    plain = warnings(loaded(tmp_path, with_etcd(f"user: u, password_file: {tmp_path}/secret", "http")))
    assert any("over http:// the user's password can be read" in text for text in plain)
    assert "hunter2" not in found


def test_a_program_that_is_not_there_is_a_warning_and_no_error(tmp_path: Path) -> None:
    absent = loaded(tmp_path, SMALL.replace("[sleep, 60]", "[no-such-program]"))
    assert any("no-such-program" in text for text in warnings(absent))
    assert not any("command" in text for text in warnings(loaded(tmp_path, SMALL)))
    elsewhere = loaded(tmp_path, SMALL + "    env: {PATH: /nowhere}\n")
    assert any("'sleep' is not an executable" in text for text in warnings(elsewhere))


def test_a_ttl_too_short_for_an_election_of_etcd_is_warned_of_with_etcd_alone(tmp_path: Path) -> None:
    etcd = "store: etcd\n  ttl: 9\n  etcd: {endpoints: ['http://127.0.0.1:2379']}"
    assert any("ttl 9 s" in text for text in warnings(loaded(tmp_path, SMALL.replace("store: local", etcd))))
    local = loaded(tmp_path, SMALL.replace("store: local", "store: local\n  ttl: 9"))
    assert not any("ttl" in text for text in warnings(local))


@ROOT
def test_an_on_demand_service_that_may_not_ask_for_the_gpu_is_warned_of(tmp_path: Path) -> None:
    demand = SMALL.replace("lifetime", "on-demand")
    assert not any("lock run" in text for text in warnings(loaded(tmp_path, demand)))
    stranger = demand.replace("user: 0", "user: nobody")
    without = next(text for text in warnings(loaded(tmp_path, stranger)) if "lock run" in text)
    assert "no `group` is set" in without
    assert "set `group` to a group of nobody" in without
    outside = next(text for text in warnings(loaded(tmp_path, stranger + "group: 54321\n")) if "lock run" in text)
    assert "nobody is not in group 54321" in outside
    own = pwd.getpwnam("nobody").pw_gid
    assert not any("lock run" in text for text in warnings(loaded(tmp_path, f"{stranger}group: {own}\n")))
    assert not any("lock run" in text for text in warnings(loaded(tmp_path, SMALL.replace("user: 0", "user: nobody"))))


@pytest.mark.parametrize("port", ["189090", "65536", "0"])
def test_a_port_that_is_none_is_told_as_such(tmp_path: Path, port: str) -> None:
    problem = one_problem(tmp_path, SMALL + f"api: {{listen: '127.0.0.1:{port}'}}\n")
    assert problem.expected == "a port from 1 to 65535"


def test_errors_of_one_service_do_not_hide_each_other(tmp_path: Path) -> None:
    text = SMALL.replace("user:", "cwd: tmp\n    priority: high\n    user: nobody-here\n    uesr:").replace(
        "    lock: lifetime", ""
    )
    found = {problem.path.rpartition(".")[2] for problem in problems(tmp_path, text)}
    assert found == {"cwd", "priority", "user", "uesr", "lock"}


def _keys(model: Any) -> set[str]:
    keys = set()
    for name, field in model.model_fields.items():
        keys.add(name)
        for kind in (field.annotation, *get_args(field.annotation)):
            if hasattr(kind, "model_fields"):
                keys |= _keys(kind)
    return keys


@ROOT
def test_the_example_loads() -> None:
    config = load(EXAMPLES / "gpuward.yml")
    assert set(config.services) == {"trainer", "heartbeat"}


def test_the_node_to_try_lies_below_one_folder(tmp_path: Path) -> None:
    """As README.md makes it: a copy, beside which no services.d is read, with the own user."""
    text = (EXAMPLES / "try.yml").read_text().replace("user: root", f"user: {os.geteuid()}")
    config = loaded(tmp_path, text)
    assert len(config.services) == 2
    assert config.allow_weak_containment
    paths = [config.paths.run, config.paths.state, config.paths.log, config.election.local.file]
    assert all(path.is_relative_to("/tmp/gpuward-try") for path in (*paths, config.gpu.simulated.folder))
    assert not any("lock run" in text for text in warnings(config))


def test_the_example_explains_every_key_of_the_schema() -> None:
    text = (EXAMPLES / "gpuward.yml").read_text()
    explained = set(re.findall(r"^ *(?:# *)?([a-z_]+):", text, re.MULTILINE))
    assert _keys(Config) - explained == set()
    assert len(_keys(Config)) > 30
