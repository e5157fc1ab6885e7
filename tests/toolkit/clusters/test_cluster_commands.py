"""Commands for a run on Kubernetes or Slurm, from what its nodes stored in a shared folder.

The commands run without a network: SageMaker is not asked.
"""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sm_train
import yaml
from sm_train.entrypoints.clusters.node_record import read_nodes, read_stop_request
from sm_train.estimators.config.schema import RunConfig
from sm_train.toolkit.base.errors import ExitCode

from tests.conftest import Cli
from tests.support.cluster.stored_run import COMMANDS, StoredRun
from tests.support.job_log_lines import SimulatedJob
from tests.support.run_documents import run
from tests.support.run_files import one_line
from tests.support.webhook_server import webhook_server

OWN = "own.8xH100-SXM5-80GB.3200gbps.24usd"


@pytest.fixture
def stored(tmp_path: Path) -> StoredRun:
    """Return a run of two nodes of the user's own at $24 an hour, in a shared folder."""
    document = run()
    document["name"] = "art"
    document["region"] = "us-east-1"
    document["cluster"]["instance_type"] = OWN
    document["stages"] = [document["stages"][0] | {"name": "256px", "instances": 2}]
    document["kubernetes"] = {"image": "registry.example.com/train:1"}
    return StoredRun(tmp_path / "shared/art/checkpoints", RunConfig.model_validate(document))


def document_of(cli: Cli, *arguments: str | Path, **options: Any) -> dict[str, Any]:
    done = cli(*arguments, "--json", **options)
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def hours_of(stored: StoredRun) -> float:
    """Return the hours of all nodes, by their records."""
    return sum(node.record.ran for node in read_nodes(stored.storage("256px"))) / 3600


def test_status_of_live_nodes(cli: Cli, stored: StoredRun) -> None:
    stored.attempt(time.time() - 20)
    stored.checkpoint(1000)
    for place in (stored.folder, stored.folder.parent, stored.folder / "256px"):
        document = document_of(cli, "status", place)
        assert (document["run"], document["state"], document["stage"]) == (
            "art",
            "training",
            "256px",
        )
        [stage] = document["stages"]
        assert stage["checkpoint_step"] == 1000
        assert stage["steps_per_second"] == pytest.approx(1.8, rel=0.02)
        [job] = stage["jobs"]
        assert (job["name"], job["status"]) == ("art--256px-kubernetes-0001", "InProgress")
        spent = 2 * 24 * job["billable_seconds"] / 3600
        assert document["spent_usd"] == pytest.approx(spent)
        assert document["remaining_usd"] > 0
        assert document["next_command"] == f"sm-train watch {place}"
    shown = cli("status", stored.folder)
    assert f"art on Kubernetes, in {stored.folder}" in shown.stdout.replace("\n", "")
    assert "art--256px-kubernetes-0001: InProgress (Training)" in shown.stdout


@pytest.mark.parametrize(
    ("states", "codes", "fields", "state", "reason"),
    [
        (
            ("training", "training"),
            (None, None),
            {},
            "lost",
            "no heartbeat of algo-1 (gpu-01), algo",
        ),
        (("ended", "ended"), (1, 143), {}, "failed", "algo-1 (gpu-01) ended with exit code 1"),
        (("ended", "ended"), (1, 75), {}, "failed", "after a new checkpoint was stored"),
        (("ended", "training"), (1, None), {}, "failed", "algo-1 (gpu-01) ended with exit code 1"),
        (("ended", "ended"), (143, 143), {}, "stopped", "SIGTERM stopped it"),
        (
            ("ended", "ended"),
            (0, 0),
            {"stopped_by": "sm-train stop"},
            "stopped",
            "sm-train stop asked",
        ),
        (("ended", "ended"), (0, 0), {}, "no-results", None),
    ],
)
def test_status_says_how_the_nodes_ended(
    cli: Cli,
    stored: StoredRun,
    states: Any,
    codes: Any,
    fields: Any,
    state: str,
    reason: str | None,
) -> None:
    stored.attempt(time.time() - 600, states=states, codes=codes, **fields)
    document = document_of(cli, "status", stored.folder)
    [stage] = document["stages"]
    assert (document["state"], stage["state"]) == (state, state)
    failure = stage["jobs"][0]["failure_reason"]
    assert failure is None if reason is None else reason in failure
    expected = COMMANDS["resume"] if state == "stopped" else f"sm-train diagnose {stored.folder}"
    assert document["next_command"] == expected


def test_attempts_are_counted_and_the_newest_decides(cli: Cli, stored: StoredRun) -> None:
    stored.attempt(time.time() - 4000, states=("ended", "ended"), codes=(1, 143))
    stored.attempt(time.time() - 10)
    document = document_of(cli, "status", stored.folder)
    [stage] = document["stages"]
    assert [job["status"] for job in stage["jobs"]] == ["Failed", "InProgress"]
    assert stage["job"] == "art--256px-kubernetes-0002"
    assert document["state"] == "training"


def test_node_without_heartbeat_among_live_ones_is_a_warning(cli: Cli, stored: StoredRun) -> None:
    [first, _] = stored.attempt(time.time() - 10)
    ceased = time.time() - 600
    stored.store(replace(first, seen=ceased), ceased)
    document = document_of(cli, "status", stored.folder)
    assert document["state"] == "training"
    [warning] = document["warnings"]
    assert warning.startswith("no heartbeat of algo-1 (gpu-01) for 1")


def test_clock_of_a_node_is_reported_and_does_not_decide(cli: Cli, stored: StoredRun) -> None:
    """One node's clock is an hour ahead, also in the times of its log."""
    end = time.time() - 10
    [_, second] = stored.attempt(end)
    stored.store(replace(second, started=second.started + 3600, seen=end + 3600), end)
    (stored.folder / "256px" / second.file).unlink()
    for arguments in (("status",), ("watch", "--once")):
        document = document_of(cli, arguments[0], stored.folder, *arguments[1:])
        assert document["state"] == "training"
        assert "algo-2 (gpu-02): its clock is 3,600 s ahead of that of the storage" in str(document)
    stored.store(replace(second, started=second.started + 3600, seen=end - 990 + 3600), end - 990)
    document = document_of(cli, "status", stored.folder)
    assert "no heartbeat of algo-2 (gpu-02) for 1" in str(document["warnings"])


def test_list_shows_the_runs_in_a_shared_folder(cli: Cli, stored: StoredRun) -> None:
    stored.attempt(time.time() - 4000, states=("ended", "ended"), codes=(1, 143))
    stored.attempt(time.time() - 10)
    shared = stored.folder.parents[1]
    [listed] = document_of(cli, "list", shared)["runs"]
    assert (listed["run"], listed["stage"], listed["status"], listed["jobs"]) == (
        "art",
        "256px",
        "InProgress",
        2,
    )
    assert listed["spent_usd"] == pytest.approx(24 * hours_of(stored))
    assert "art" in cli("list", shared).stdout
    assert cli("list", shared / "art").stdout == f"No run had a recent job in {shared / 'art'}.\n"
    missing = cli("list", "nowhere")
    assert one_line(missing.stderr).startswith("sm-train: nowhere: no such folder")


def test_logs_of_all_nodes_are_in_order(cli: Cli, stored: StoredRun) -> None:
    stored.attempt(time.time() - 600, states=("ended", "ended"), codes=(0, 0))
    shown = cli("logs", stored.folder)
    assert shown.stdout.splitlines() == ["algo-1 | node 0 starts", "algo-2 | node 1 starts"]
    raw = cli("logs", stored.folder, "--raw", "--json").stdout.splitlines()
    times = [json.loads(line)["time"] for line in raw]
    assert times == sorted(times)
    assert len(raw) > 60
    second = cli("logs", stored.folder, "--node", "2").stdout
    assert second == "algo-2 | node 1 starts\n"


def test_diagnose_names_the_cause_in_the_newest_attempt(cli: Cli, stored: StoredRun) -> None:
    oom = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    stored.attempt(
        time.time() - 600,
        states=("ended", "ended"),
        codes=(1, 143),
        texts={0: ["Traceback (most recent call last):", oom]},
    )
    document = document_of(cli, "diagnose", stored.folder)
    assert document["cause"] == "gpu-out-of-memory"
    assert document["first_failure"]["node"] == "algo-1"


def test_diagnose_of_lost_nodes_says_that_heartbeats_ceased(cli: Cli, stored: StoredRun) -> None:
    stored.attempt(time.time() - 600)
    done = cli("diagnose", stored.folder)
    assert done.returncode == 0, done.stderr
    assert "no heartbeat of algo-1 (gpu-01)" in done.stdout


def test_review_shows_speed_and_the_cost_by_heartbeats(cli: Cli, stored: StoredRun) -> None:
    job = SimulatedJob(nodes=2, intervals=60)
    stored.attempt(time.time() - 600, job=job, states=("ended", "ended"), codes=(0, 0))
    document = document_of(cli, "review", stored.folder)
    [reviewed] = document["jobs"]
    assert reviewed["name"] == "art--256px-kubernetes-0001"
    assert reviewed["steps_per_second"] == pytest.approx(1.8, rel=0.02)
    assert reviewed["instance_type"] == OWN
    assert reviewed["billed_usd"] == pytest.approx(24 * hours_of(stored))
    [projection] = document["runs"].values()
    assert projection["spent_usd"] == pytest.approx(24 * hours_of(stored))


def test_actual_cost_is_that_of_the_hours_with_heartbeats(cli: Cli, stored: StoredRun) -> None:
    stored.attempt(time.time() - 600, states=("ended", "ended"), codes=(1, 143))
    stored.attempt(time.time() - 10)
    document = document_of(cli, "cost", stored.folder, "--actual")
    assert [job["status"] for job in document["jobs"]] == ["Failed", "InProgress"]
    assert document["total"]["billed_usd"] == pytest.approx(24 * hours_of(stored))
    shown = cli("cost", stored.folder, "--actual")
    assert shown.returncode == 0, shown.stderr


def test_stop_is_requested_through_the_storage(cli: Cli, stored: StoredRun) -> None:
    stored.attempt(time.time() - 10)
    done = cli("stop", stored.folder)
    assert done.returncode == 0, done.stderr
    assert COMMANDS["resume"] in done.stderr
    request = read_stop_request(stored.storage("256px"))
    assert request is not None
    assert request.by == "sm-train stop"
    assert document_of(cli, "status", stored.folder)["state"] == "stopping"


def test_watch_alerts_once_when_every_node_is_gone_and_again_when_it_is_over(
    cli: Cli, stored: StoredRun
) -> None:
    stored.attempt(time.time() - 600)
    stored.checkpoint(1000)
    with webhook_server() as server:
        env = {"SM_TRAIN_WEBHOOK": server.address}
        for _ in range(2):
            done = cli("watch", stored.folder, "--once", "--json", network="loopback", env=env)
            assert done.returncode == ExitCode.STALLED, done.stderr
            document = json.loads(done.stdout)
            assert (document["state"], document["action"]) == ("lost", "wait")
        [alert] = server.received
        assert alert["title"] == "no node sends heartbeats"
        assert alert["symptom"].startswith("no heartbeat of algo-1 (gpu-01), algo-2 (gpu-02) for 1")
        assert alert["last_checkpoint"] == "step-00001000"
        assert alert["command"] == COMMANDS["status"]
        assert alert["burned_usd"] == pytest.approx(2 * 24 * alert["silent_seconds"] / 3600)
        stored.attempt(time.time() - 10)
        done = cli("watch", stored.folder, "--once", "--json", network="loopback", env=env)
        assert done.returncode == 0, done.stderr
        assert [sent["resolved"] for sent in server.received] == [False, True]


def test_watch_that_cannot_alert_says_so_and_tries_again(cli: Cli, stored: StoredRun) -> None:
    stored.attempt(time.time() - 600)
    done = cli("watch", stored.folder, "--once")
    assert done.returncode == ExitCode.STALLED
    assert "this machine has no sink" in done.stderr.replace("\n", " ")
    with webhook_server() as server:
        server.responses += [(500, {})]
        env = {"SM_TRAIN_WEBHOOK": server.address}
        done = cli("watch", stored.folder, "--once", network="loopback", env=env)
        assert "did not arrive: webhook: HTTP 500" in done.stderr.replace("\n", " ")
        cli("watch", stored.folder, "--once", network="loopback", env=env)
        assert len(server.received) == 1


def test_watch_stops_nodes_at_the_budget(cli: Cli, stored: StoredRun) -> None:
    config = stored.config.model_dump(mode="json")
    config["budget"] = {"usd": 5.0}
    stored.config = RunConfig.model_validate(config)
    stored.attempt(time.time() - 10)
    dry = cli("watch", stored.folder, "--once", "--dry-run")
    assert dry.returncode == ExitCode.OVER_BUDGET, dry.stderr
    assert read_stop_request(stored.storage("256px")) is None
    done = cli("watch", stored.folder, "--once")
    assert done.returncode == ExitCode.OVER_BUDGET, done.stderr
    request = read_stop_request(stored.storage("256px"))
    assert request is not None
    assert request.by == "the budget of $5.00, which is spent,"


@pytest.mark.parametrize(
    ("age", "codes", "fields", "action", "code"),
    [
        (60, (1, 143), {}, "wait", ExitCode.OK),
        (60, (143, 143), {}, "wait", ExitCode.OK),
        (600, (143, 143), {}, "wait", ExitCode.STALLED),
        (600, (1, 143), {}, "wait", ExitCode.STALLED),
        (90_000, (1, 143), {}, "end", ExitCode.STALLED),
        (60, (0, 0), {"stopped_by": "the user"}, "end", ExitCode.OK),
        (600, (0, 0), {"stopped_by": "the user"}, "end", ExitCode.OK),
        (60, (0, 0), {}, "end", ExitCode.OK),
    ],
)
def test_watch_waits_for_the_platform_to_start_a_job_again(
    cli: Cli,
    stored: StoredRun,
    age: float,
    codes: tuple[int, int],
    fields: dict[str, Any],
    action: str,
    code: ExitCode,
) -> None:
    stored.checkpoint(500)
    stored.attempt(time.time() - age, states=("ended", "ended"), codes=codes, **fields)
    done = cli("watch", stored.folder, "--once", "--json")
    assert (json.loads(done.stdout)["action"], done.returncode) == (action, code), done.stdout


@pytest.mark.parametrize("age", [60, 600])
def test_an_attempt_that_lost_its_last_checkpoint_is_not_waited_for(
    cli: Cli, stored: StoredRun, age: float
) -> None:
    stored.checkpoint(500)
    stored.attempt(time.time() - age, states=("ended", "ended"), codes=(74, 143))
    done = cli("watch", stored.folder, "--once", "--json")
    assert done.returncode == ExitCode.JOB_FAILED, done.stdout
    document = json.loads(done.stdout)
    assert document["action"] == "end"
    assert "exit code 74: its last checkpoint is not stored" in document["message"]


def test_watch_of_live_nodes_continues(cli: Cli, stored: StoredRun) -> None:
    stored.attempt(time.time() - 10)
    document = json.loads(cli("watch", stored.folder, "--once", "--json").stdout)
    assert (document["action"], document["state"]) == ("wait", "training")
    assert [node["node"] for node in document["nodes"]] == ["algo-1", "algo-2"]
    assert not (stored.folder / "256px/job-records/alerts.json").exists()


def test_speed_of_the_newest_attempt_prices_another_run(
    cli: Cli, stored: StoredRun, tmp_path: Path
) -> None:
    stored.attempt(time.time() - 4000, states=("ended", "ended"), codes=(1, 143))
    fast = SimulatedJob(nodes=2, intervals=30, speed=lambda share: 3.6)
    stored.attempt(time.time() - 10, job=fast)
    path = tmp_path / "run.yaml"
    document = stored.config.model_dump(mode="json", exclude_defaults=True)
    del document["stages"][0]["steps_per_second"]
    path.write_text(yaml.safe_dump(document))
    priced = document_of(cli, "cost", path, "--measured", stored.folder, "--rescale-batch")
    assert "mean of 29 intervals): 3.6 it/s" in priced["assumptions"][0]


def test_interrupted_attempt_has_ended_when_another_follows(cli: Cli, stored: StoredRun) -> None:
    """A killed node leaves a young heartbeat; the attempt after it may end before that is old."""
    stored.attempt(time.time() - 100, states=("ended", "training"), codes=(1, None))
    records = stored.attempt(time.time() - 5, states=("ended",), codes=(0,))
    end = records[0].seen
    stored.store(replace(records[0], started=end - 45, ran=45.0), end)
    (stored.folder / "256px" / records[0].file).unlink()
    stages = document_of(cli, "status", stored.folder)["stages"]
    assert [job["status"] for job in stages[0]["jobs"]] == ["Failed", "Completed"]


def test_checkpoints_in_a_folder_are_named_by_it(
    cli: Cli, stored: StoredRun, tmp_path: Path
) -> None:
    stored.attempt(time.time() - 10)
    stored.checkpoint(1000)
    document = stored.config.model_dump(mode="json", exclude_defaults=True)
    document["slurm"] = {"shared_folder": str(stored.folder.parents[1])}
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(document))
    done = cli("export", path, "out")
    assert one_line(done.stderr) == (
        f"sm-train: {path}: its checkpoints are in the folder {stored.folder / '256px'}; name that"
    )
    assert document_of(cli, "status", path)["run"] == "art"


@pytest.mark.parametrize(
    "command",
    [
        ("resume",),
        ("alarms",),
        ("stop", "--after-stage"),
    ],
)
def test_commands_of_sagemaker_refuse_the_run_in_one_line(
    cli: Cli, stored: StoredRun, command: tuple[str, ...]
) -> None:
    stored.attempt(time.time() - 10)
    done = cli(command[0], stored.folder, *command[1:])
    assert done.returncode == ExitCode.USAGE
    assert "Kubernetes" in one_line(done.stderr)


def test_python_api_reads_a_run_on_a_cluster(stored: StoredRun) -> None:
    stored.attempt(time.time() - 10)
    job = sm_train.Job(str(stored.folder))
    assert job.status().state == "training"
    assert next(job.logs()).message == "node 0 starts"
    assert job.metrics().column("step")[-1] > 3000
    assert job.stop() == "Stopping"
