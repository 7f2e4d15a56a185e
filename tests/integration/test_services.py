"""Services on a real keeper: launched, failing, waiting for their lock, stopped."""

import asyncio
import grp
import json
import os
import signal
from pathlib import Path

import pytest

from election.clock import boot_time
from supervisor import proc
from supervisor.config.service import Service
from supervisor.gpu.simulated import read_state, set_state
from supervisor.keeper.client import KeeperRefused
from supervisor.service import device, runner
from supervisor.service.order import OrderError, read_env_file
from supervisor.service.states import State
from tests.bed.keeper import PATIENCE, Bed, pid_from, soon, until
from tests.bed.services import GPUWARD, node_on, shell, spec

SLEEP = "exec sleep 600"


async def test_a_launch_starts_every_service_and_tells_it_where_it_runs(any_keeper: Bed, tmp_path: Path) -> None:
    secrets = tmp_path / "secrets"
    secrets.write_text("# a comment\n\nTOKEN='of course'\nURL=http://x/?a=b\n")
    show = f"env > {any_keeper.run}/env.txt; {SLEEP}"
    asking = shell(show, gpu=0, lock="on-demand", env={"MODEL": "llama"}, env_file=secrets)
    async with node_on(any_keeper, asking=asking, other=shell(SLEEP)) as node:
        await node.launch(7)
        assert node.services.running() == 2
        lines = (await node.file("env.txt")).splitlines()
        env = dict(line.split("=", 1) for line in lines if "=" in line)
        assert env["GPUWARD_NODE"] == "gpu1"
        assert env["GPUWARD_SERVICE"] == "asking"
        assert env["GPUWARD_FENCING_TOKEN"] == "7"
        assert env["GPUWARD_RUN_DIR"] == str(any_keeper.run)
        assert env["CUDA_VISIBLE_DEVICES"] == node.gpus[0].uuid
        assert (env["MODEL"], env["TOKEN"], env["URL"]) == ("llama", "of course", "http://x/?a=b")
        assert "PYTEST_CURRENT_TEST" not in env
        assert (await node.state("asking", State.RUNNING))["failures"] == 0


async def test_an_exit_with_0_that_nobody_asked_for_is_a_failure(any_keeper: Bed) -> None:
    """docs/services.md: "exited unexpectedly"."""
    async with node_on(any_keeper, short=shell("sleep 0.2")) as node:
        await node.launch()
        row = await node.state("short", State.BACKOFF)
        assert "exited unexpectedly with 0" in row["why"]
        assert row["failures"] == 2
        assert row["restarts"] == 1


async def test_the_restart_table_is_followed_to_its_end(any_keeper: Bed) -> None:
    async with node_on(any_keeper, broken=shell("exit 3"), well=shell(SLEEP)) as node:
        await node.launch()
        row = await node.state("broken", State.DEGRADED)
        assert (row["failures"], row["restarts"]) == (5, 4)
        changes = [event.split(": ")[1] for event in node.events if event.startswith("broken:")]
        assert [change for change in changes if "backoff" in change or "degraded" in change] == [
            *["stopping → backoff", "backoff → starting"] * 3,
            "stopping → degraded",
        ]
        assert (await node.state("well", State.RUNNING))["restarts"] == 0
        await node.services.reset("broken")
        await until(lambda: node.row("broken")["failures"] == 1 or None, "a fresh account after the reset")


async def test_a_degraded_service_stays_so_in_the_next_term_until_it_is_reset(keeper: Bed) -> None:
    async with node_on(keeper, broken=shell("exit 3")) as node:
        await node.launch(1)
        await node.state("broken", State.DEGRADED)
        await node.end()
        assert node.row("broken")["state"] == "degraded"
        await node.launch(2)
        await asyncio.sleep(0)
        assert node.row("broken")["state"] == "degraded"
        await node.services.reset("broken")
        await node.state("broken", State.BACKOFF)


async def test_what_a_dead_service_leaves_behind_is_gone_before_it_starts_again(any_keeper: Bed) -> None:
    """Supervisor 1101: grandchildren outlive their parent. mxnet 4242 too: the cgroup is what counts."""
    run = any_keeper.run
    script = f"""
        if [ -e {run}/second ]; then
            verdict=gone
            grep -qs '^State:.[^ZX]' /proc/$(cat {run}/orphan.pid)/status && verdict=alive
            echo $verdict > {run}/verdict
            {SLEEP}
        fi
        touch {run}/second
        setsid sh -c 'trap "" TERM HUP; echo $$ > {run}/orphan.pid; exec sleep 600' &
        while [ ! -s {run}/orphan.pid ]; do sleep 0.01; done
    """
    async with node_on(any_keeper, parent=shell(script)) as node:
        await node.launch()
        assert await node.file("verdict") == "gone\n"


async def test_a_program_that_does_not_exist_fails_only_itself(any_keeper: Bed) -> None:
    async with node_on(any_keeper, missing=spec("/no/such/program"), well=shell(SLEEP)) as node:
        await node.launch()
        row = await node.state("missing", State.BACKOFF)
        assert "No such file" in row["why"]
        await node.state("well", State.RUNNING)


async def test_an_env_file_that_is_wrong_fails_only_its_service(keeper: Bed, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.env"
    wrong.write_text("GOOD=1\nsecret words\n")
    async with node_on(keeper, odd=shell(SLEEP, env_file=wrong), well=shell(SLEEP)) as node:
        await node.launch()
        row = await node.state("odd", State.BACKOFF)
        assert "line 2" in row["why"]
        assert "secret" not in row["why"]
        await node.state("well", State.RUNNING)


@pytest.mark.parametrize(
    ("content", "said"), [(b"A", "line 1"), (b"1A=2\n", "line 1"), (b"A=\xff\n", "UTF-8"), (b"A=1\n" * 20000, "longer")]
)
def test_an_env_file_is_read_strictly(tmp_path: Path, content: bytes, said: str) -> None:
    file = tmp_path / "e"
    file.write_bytes(content)
    with pytest.raises(OrderError, match=said):
        read_env_file(file)


async def test_the_launch_fails_when_the_keeper_starts_nothing(keeper: Bed) -> None:
    async with node_on(keeper, one=shell(SLEEP), two=shell(SLEEP)) as node:
        await node.arm(5)
        with pytest.raises(KeeperRefused, match="no-term"):
            await node.services.launch(6, deadline=soon())
        assert node.services.running() == 0


# ---- the GPU's lock


async def test_a_lifetime_lock_is_kept_through_an_immediate_restart(any_keeper: Bed) -> None:
    """docs/services.md, Restart: no window opens in which another can take the GPU."""
    async with node_on(
        any_keeper,
        first=shell(SLEEP, gpu=0, lock="lifetime", gpu_fd="optional", priority=1),
        second=shell(SLEEP, gpu=0, lock="lifetime", gpu_fd="optional"),
    ) as node:
        await node.launch()
        old = (await node.state("first", State.RUNNING))["pid"]
        assert node.row("second")["state"] == "waiting-lock"
        os.kill(old, signal.SIGKILL)
        await node.new_pid("first", old)
        assert not [event for event in any_keeper.events if event["event"] == "lock-free"]
        assert node.row("second")["state"] == "waiting-lock"
        assert (node.row("first")["lock"], node.row("second")["lock"]) == ("held", "waiting")


async def test_the_lock_is_freed_in_backoff_and_the_next_in_line_gets_it_at_once(
    any_keeper: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the event, not by a look some time."""
    monkeypatch.setattr(runner, "POLL", 600.0)
    slow = {"backoff": (600.0,)}
    async with node_on(
        any_keeper,
        first=shell("sleep 0.1; exit 1", gpu=0, lock="lifetime", gpu_fd="optional", priority=1, restart=slow),
        second=shell(SLEEP, gpu=0, lock="lifetime", gpu_fd="optional"),
    ) as node:
        await node.launch()
        await node.state("first", State.BACKOFF)
        await node.state("second", State.STARTING, State.RUNNING)
        assert node.row("second")["lock"] == "held"


async def test_the_lock_goes_by_priority_then_first_come(any_keeper: Bed) -> None:
    def holder(priority: int) -> Service:
        return shell(SLEEP, gpu=0, lock="lifetime", gpu_fd="optional", priority=priority, restart={"backoff": (600.0,)})

    async with node_on(
        any_keeper,
        low=holder(0),
        late=holder(0),
        high=holder(5),
        middle=holder(3),
    ) as node:
        await node.launch()
        order = []
        for _ in range(4):
            row = await until(
                lambda: next((r for r in node.services.snapshot() if r["lock"] == "held" and r["pid"]), None),
                "a holder",
            )
            order.append(row["name"])
            for _ in range(2):  # the second failure frees the lock
                pid = row["pid"]
                os.kill(pid, signal.SIGKILL)
                if node.row(row["name"])["failures"] == 0:
                    row = row | {"pid": await node.new_pid(row["name"], pid)}
            await node.state(row["name"], State.BACKOFF)
        assert order == ["high", "middle", "low", "late"]


async def test_75_with_another_holder_waits_for_the_release_and_is_no_failure(any_keeper: Bed) -> None:
    """docs/services.md, Restart, last lines of the table."""
    run = any_keeper.run
    hold = f"{GPUWARD} lock run --gpu 0 -- sh -c 'echo held > {run}/held; while [ ! -e {run}/go ]; do sleep 0.02; done'"
    turn = f"[ -e {run}/held ] || sleep 0.05; exec {GPUWARD} lock run --gpu 0 -- sleep 600"
    async with node_on(
        any_keeper,
        holder=shell(f"{hold}; {SLEEP}", gpu=0, lock="on-demand"),
        asking=shell(f"while [ ! -e {run}/held ]; do sleep 0.02; done; {turn}", gpu=0, lock="on-demand"),
    ) as node:
        await node.launch()
        row = await node.state("asking", State.WAITING_LOCK)
        assert "holder" in row["why"]
        assert row["failures"] == 0
        (run / "go").touch()
        await node.state("asking", State.RUNNING)
        assert node.row("asking")["failures"] == 0


async def test_75_without_another_holder_is_a_failure(any_keeper: Bed) -> None:
    async with node_on(any_keeper, odd=shell("sleep 0.1; exit 75", gpu=0, lock="on-demand")) as node:
        await node.launch()
        row = await node.state("odd", State.BACKOFF)
        assert "75" in row["why"]
        assert row["failures"] == 2


# ---- between the end and the next start


async def test_no_restart_while_the_driver_lists_the_dead_process(keeper: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    """sglang 39545: restarted before the old one was gone. VisEdit 5: a PID that does not exist holds the memory."""
    monkeypatch.setattr(device, "CLEAR_WAIT", 0.3)
    monkeypatch.setattr(runner, "QUARANTINE_LOOK", 0.1)
    llm = shell(SLEEP, gpu=0, lock="lifetime", gpu_fd="optional")
    async with node_on(keeper, llm=llm) as node:
        await node.launch()
        pid = (await node.state("llm", State.RUNNING))["pid"]
        set_state(node.folder, 0, ghost_pids=[pid])
        os.kill(pid, signal.SIGKILL)
        row = await node.state("llm", State.QUARANTINED)
        assert str(pid) in row["why"]
        assert row["lock"] == "held"
        assert node.services.quarantined() == [f"llm: {row['why']}"]
        set_state(node.folder, 0, ghost_pids=[])
        row = await node.state("llm", State.STOPPED)
        assert row["lock"] == "free"


async def test_a_gpu_that_is_lost_gets_no_new_process(keeper: Bed) -> None:
    """docs/services.md, Restart: a node-level fault is not the service's failure."""
    async with node_on(keeper, llm=shell(SLEEP, gpu=0, lock="lifetime", gpu_fd="optional")) as node:
        await node.launch()
        pid = (await node.state("llm", State.RUNNING))["pid"]
        set_state(node.folder, 0, verdict="lost")
        os.kill(pid, signal.SIGKILL)
        row = await node.state("llm", State.QUARANTINED)
        assert "lost" in row["why"]
        assert row["failures"] == 0


async def test_the_gpu_is_reset_after_the_watchdogs_kill_and_not_after_a_plain_exit(keeper: Bed) -> None:
    """docs/services.md, Restart: `after-kill`."""
    async with node_on(keeper, llm=shell(SLEEP, gpu=0, lock="lifetime", gpu_fd="optional")) as node:
        await node.launch()
        first = (await node.state("llm", State.RUNNING))["pid"]
        os.kill(first, signal.SIGKILL)
        second = await node.new_pid("llm", first)
        assert read_state(node.folder, 0).resets == 0
        await node.services.restart("llm", "lost-gpu: made up", kill=True, pid=second)
        await node.state("llm", State.BACKOFF)
        assert read_state(node.folder, 0).resets == 1


async def test_a_restart_meant_for_an_earlier_process_does_nothing_to_the_next(keeper: Bed) -> None:
    """nomad PR 24538, kubernetes 53530: nothing that was found out about one process counts for another."""
    async with node_on(keeper, llm=shell(SLEEP)) as node:
        await node.launch()
        first = (await node.state("llm", State.RUNNING))["pid"]
        os.kill(first, signal.SIGKILL)
        second = await node.new_pid("llm", first)
        await node.services.restart("llm", "dead: made up", kill=True, pid=first)
        await node.state("llm", State.RUNNING)
        assert node.row("llm")["pid"] == second
        assert node.row("llm")["failures"] == 1


async def test_an_operators_restart_does_not_count(any_keeper: Bed) -> None:
    async with node_on(any_keeper, llm=shell(SLEEP)) as node:
        await node.launch()
        pid = (await node.state("llm", State.RUNNING))["pid"]
        for _ in range(3):
            await node.services.restart("llm", "asked for by an operator", kill=False, counts=False)
            pid = await node.new_pid("llm", pid)
            await node.state("llm", State.RUNNING)
        assert (node.row("llm")["failures"], node.row("llm")["restarts"]) == (0, 3)


# ---- stopping


async def test_a_stop_is_graceful_and_parallel(any_keeper: Bed) -> None:
    run = any_keeper.run
    for name in ("told", "ready"):
        (run / name).mkdir()
    script = """
        trap 'touch {0}/told/$GPUWARD_SERVICE
              until [ "$(ls {0}/told | wc -l)" = 3 ]; do sleep 0.02; done
              echo $GPUWARD_SERVICE >> {0}/stopped; exit 0' TERM
        touch {0}/ready/$GPUWARD_SERVICE
        while :; do sleep 0.02; done
    """
    polite = shell(script.format(run), stop_timeout=600.0)  # each waits until all have been told
    async with node_on(any_keeper, one=polite, two=polite, three=polite) as node:
        await node.launch()
        await until(lambda: len(os.listdir(run / "ready")) == 3, "the traps")
        await node.services.stop_all(by=soon(), graceful=True)
        assert sorted((run / "stopped").read_text().split()) == ["one", "three", "two"]
        assert [row["state"] for row in node.services.snapshot()] == ["stopped"] * 3


async def test_stop_timeout_ends_in_a_kill(any_keeper: Bed) -> None:
    deaf = shell(f'trap "" TERM; touch {any_keeper.run}/deaf; while :; do sleep 0.05; done', stop_timeout=0.3)
    async with node_on(any_keeper, deaf=deaf) as node:
        await node.launch()
        await until((any_keeper.run / "deaf").exists, "the trap")
        pid = node.row("deaf")["pid"]
        began = boot_time()
        await node.services.stop_all(by=began + 60, graceful=True)
        assert 0.3 <= boot_time() - began < 30
        assert proc.stat(pid) is None
        assert node.row("deaf")["state"] == "stopped"


async def test_the_fences_time_wins_over_stop_timeout(any_keeper: Bed) -> None:
    """docs/services.md: when the node is fencing, its own times win. consul 9788: the child ran on."""
    deaf = shell(f'trap "" TERM; touch {any_keeper.run}/deaf; while :; do sleep 0.05; done', stop_timeout=60.0)
    async with node_on(any_keeper, deaf=deaf) as node:
        await node.launch()
        await until((any_keeper.run / "deaf").exists, "the trap")
        pid = node.row("deaf")["pid"]
        by = boot_time() + 0.3
        await node.services.stop_all(by=by, graceful=True)
        assert boot_time() < by + 30
        assert proc.stat(pid) is None


async def test_a_second_impatient_stop_kills_at_once(any_keeper: Bed) -> None:
    deaf = shell(f'trap "" TERM; touch {any_keeper.run}/deaf; while :; do sleep 0.05; done', stop_timeout=600.0)
    async with node_on(any_keeper, deaf=deaf) as node:
        await node.launch()
        await until((any_keeper.run / "deaf").exists, "the trap")
        patient = asyncio.create_task(node.services.stop_all(by=boot_time() + 600, graceful=True))
        await node.state("deaf", State.STOPPING)
        await node.services.fence_now()
        async with asyncio.timeout(PATIENCE):
            await patient
        assert node.row("deaf")["state"] == "stopped"


async def test_nothing_starts_again_after_a_stop_until_the_next_launch(keeper: Bed) -> None:
    quick = {"backoff": (0.2, 0.2, 0.2)}
    async with node_on(keeper, pausing=shell("exit 1", restart=quick), well=shell(SLEEP)) as node:
        await node.launch(1)
        await node.state("pausing", State.BACKOFF)
        await node.end()
        assert [row["state"] for row in node.services.snapshot()] == ["stopped", "stopped"]
        starts = len([event for event in node.events if "→ starting" in event])
        await asyncio.sleep(0.5)  # longer than the pause that was running
        assert len([event for event in node.events if "→ starting" in event]) == starts
        await node.launch(2)
        assert (await node.state("well", State.RUNNING))["restarts"] == 0


async def test_a_stop_does_not_wait_for_a_driver(keeper: Bed) -> None:
    async with node_on(keeper, llm=shell(SLEEP, gpu=0, lock="lifetime", gpu_fd="optional")) as node:
        await node.launch()
        pid = (await node.state("llm", State.RUNNING))["pid"]
        set_state(node.folder, 0, answer_s=600)
        os.kill(pid, signal.SIGKILL)
        await node.state("llm", State.STOPPING)
        async with asyncio.timeout(PATIENCE):
            await node.services.stop_all(by=boot_time() + 600, graceful=True)
        assert node.row("llm")["state"] == "stopped"


async def test_processes_are_killed_without_the_keepers_help_when_it_is_gone(keeper: Bed) -> None:
    """rule 16: the supervisor fences on the same schedule by itself."""
    async with node_on(keeper, llm=shell(SLEEP)) as node:
        await node.launch()
        pid = (await node.state("llm", State.RUNNING))["pid"]
        os.kill(keeper.pid, signal.SIGSTOP)
        await keeper.client.close()
        await node.services.fence_now()
        assert proc.stat(pid) is None or proc.stat(pid).state in "ZX"  # type: ignore[union-attr]
        assert node.row("llm")["state"] == "stopped"
        os.kill(keeper.pid, signal.SIGCONT)


# ---- the monitor


async def test_a_fault_of_ours_stays_with_its_service(keeper: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    async with node_on(keeper, one=shell(SLEEP, gpu=0, lock="on-demand"), two=shell(SLEEP)) as node:
        await node.launch()
        one, two = (await node.state("one", State.RUNNING))["pid"], (await node.state("two", State.RUNNING))["pid"]

        async def broken(**_: object) -> None:
            raise RuntimeError("made up")

        monkeypatch.setattr(node.driver, "facts", broken)
        os.kill(one, signal.SIGKILL)
        await until(lambda: any("made up" in event for event in node.events) or None, "the fault to be told")
        os.kill(two, signal.SIGKILL)
        await node.new_pid("two", two)
        monkeypatch.undo()
        await node.new_pid("one", one)


async def test_the_monitor_shows_life(keeper: Bed) -> None:
    """rule 4: the lease is refreshed only while it does."""
    async with node_on(keeper) as node:
        first = node.services.life
        await until(lambda: node.services.life > first or None, "a sign of life")


async def test_the_snapshot_is_json(keeper: Bed) -> None:
    async with node_on(keeper, llm=shell(SLEEP, gpu=0, lock="on-demand")) as node:
        await node.launch()
        await node.state("llm", State.RUNNING)
        rows = json.loads(json.dumps(node.services.snapshot()))
        assert set(rows[0]) == {
            "name", "state", "why", "for_s", "pid", "restarts", "failures", "next_s", "gpu", "lock", "status",
            "sidecars",
        }  # fmt: skip
        pid, _ = await pid_from(_write(keeper.run / "pid", str(rows[0]["pid"])))
        assert pid == rows[0]["pid"]


def _write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


async def test_a_log_may_be_read_by_the_group_adm(keeper: Bed) -> None:
    async with node_on(keeper, s=shell(SLEEP)) as node:
        await node.launch()
        await node.state("s", State.RUNNING)
        found = os.stat(keeper.run / "s.log")
        assert (found.st_mode & 0o777, found.st_uid, found.st_gid) == (0o640, 0, grp.getgrnam("adm").gr_gid)
