"""``measure`` against a fake AWS and on this machine: price, jobs one after the other, record."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from sm_train.entrypoints.job_interface.events import format_event
from sm_train.toolkit.records.job_logs import read_events

from tests.conftest import Aws, Cli, clean_environment
from tests.support.aws.policy_enforcement import ACCOUNT
from tests.support.cluster.training_jobs import tiny_run, write_shards
from tests.support.deadline import DEADLINE
from tests.support.job_lifecycle import LOG_GROUP, FakeSageMaker
from tests.support.job_log_lines import event_values
from tests.support.run_documents import stage
from tests.support.run_files import one_line, write_run

pytestmark = pytest.mark.integration

SHARDS = {f"shards/{index}.tar": b"x" for index in range(16)} | {"index.parquet": b"x"}
GIB = 2**30


def write_measured_run(folder: Path, **changes: Any) -> Path:
    """A run of one stage on 16 instances whose speed nobody knows."""
    stages = [stage(instances=16, steps_per_second=None, gradient_accumulation_steps=1)]
    return write_run(folder, **({"stages": stages} | changes))


class MeasuringJobs:
    """Jobs that end as soon as they start, with the log of a measurement."""

    def __init__(self, aws: Aws, step_seconds: dict[int, float]) -> None:
        self.sagemaker, self._aws, self._seconds = FakeSageMaker(aws), aws, step_seconds
        self.status = "Completed"
        self.compiles = False
        """Whether the jobs log that they compile the layers."""
        self.reason: str | None = None
        start = aws.response_filters["CreateTrainingJob"]

        def finish(response: dict[str, Any]) -> dict[str, Any]:
            started = start(response)
            assert started is not None
            name = response["TrainingJobArn"].rsplit("/", 1)[1]
            body = aws.bodies("CreateTrainingJob")[-1]
            self._log(name, body)
            self.sagemaker.set_status(name, self.status, reason=self.reason, seconds=900)
            return started

        aws.response_filters["CreateTrainingJob"] = finish

    def _log(self, name: str, body: dict[str, Any]) -> None:
        logs = self._aws.client("logs")
        if not logs.describe_log_groups(logGroupNamePrefix=LOG_GROUP)["logGroups"]:
            logs.create_log_group(logGroupName=LOG_GROUP)
        logs.create_log_stream(logGroupName=LOG_GROUP, logStreamName=f"{name}/algo-1-1")
        messages = [*self._events(name, body), *self._failure()]
        now = int(time.time() * 1000)
        logs.put_log_events(
            logGroupName=LOG_GROUP,
            logStreamName=f"{name}/algo-1-1",
            logEvents=[
                {"timestamp": now + number, "message": message}
                for number, message in enumerate(messages)
            ],
        )

    def _failure(self) -> list[str]:
        if self.status != "Failed":
            return []
        return [
            "[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. "
            "GPU 0 has a total capacity of 79.10 GiB of which 1.00 GiB is free."
        ]

    def _events(self, name: str, body: dict[str, Any]) -> list[str]:
        if self.status == "Failed":
            return []
        size = re.search(r"-(\d+)x(\d+)x(\d+)-[0-9a-f]{6}-\d{4}$", name)
        assert size is not None
        nodes, batch, accumulation = map(int, size.groups())
        assert body["ResourceConfig"]["InstanceCount"] == nodes
        gpus = 8 * nodes
        speed = 1 / (self._seconds[nodes] * batch * accumulation / 8)
        start = {
            "stage": body["HyperParameters"]["stage"],
            "resolution": 256,
            "world_size": gpus,
            "nodes": nodes,
            "instance_type": "ml.p4de.24xlarge",
            "accelerator": "NVIDIA A100-SXM4-80GB",
            "per_device_batch_size": batch,
            "gradient_accumulation_steps": accumulation,
            "effective_batch_size": batch * accumulation * gpus,
            "backend": "nccl",
            "input_kind": "precomputed latents",
            "precision": "bf16",
            "reduce_dtype": "fp32",
            "compile": self.compiles,
        }
        doctor = {
            "level": "ok",
            "sentence": "8 GPUs are healthy",
            "network_bytes_per_second": 4.1e10,
            "slowdown": None,
        }
        # The first interval is the warm-up, ten times as slow.
        steps = [
            {
                "step": 20 * number,
                "steps_per_second": speed / (10 if number == 1 else 1),
                "data_wait_share": 0.5 if number == 1 else 0.02,
                "mfu": 0.31,
            }
            for number in range(1, 12)
        ]
        found: list[tuple[str, dict[str, Any]]] = [("doctor", doctor), ("start", start)]
        found += [("step", step) for step in steps]
        found.append(("end", {"gpu_memory_peak": 40 * GIB}))
        lines, time = [], 1e9
        for kind, fields in found:
            if kind == "step":
                time += 20 / float(fields["steps_per_second"])
            lines.append(format_event(kind, event_values(kind) | fields, time=time, node=0, rank=0))
        return lines


def measure(cli: Cli, aws: Aws, run: Path, *more: str, stdin: str | None = None) -> Any:
    return cli("measure", run, *more, network="loopback", env=aws.environment, stdin=stdin)


def test_price_and_time_limit_come_before_the_question(cli: Cli, aws: Aws, tmp_path: Path) -> None:
    aws.make_bucket("ai-bucket", **SHARDS)
    run = write_measured_run(tmp_path)
    document = json.loads(cli("measure", run, "--dry-run", "--json").stdout)
    first, two = document["measurements"]
    assert (first["instances"], two["instances"]) == (1, 2)
    assert (first["steps"], first["warm_up_steps"]) == (200, 20)
    # p4de.24xlarge costs $25.25 to $31 an hour in us-east-1.
    for row in (first, two):
        hourly = row["most_usd"] / row["instances"] / row["max_runtime_seconds"] * 3600
        assert 25 < hourly < 32
        assert row["expected_usd"] < row["most_usd"]
    declined = measure(cli, aws, run, stdin="n\n")
    assert declined.returncode == 130
    assert f"at most ${document['most_usd']:.2f}? [y/N]" in declined.stderr or (
        f"at most ${document['most_usd']:,.0f}? [y/N]" in declined.stderr
    )
    assert aws.bodies("CreateTrainingJob") == []


def test_jobs_are_limited_and_leave_nothing_but_their_log(
    cli: Cli, aws: Aws, tmp_path: Path
) -> None:
    aws.make_bucket("ai-bucket", **SHARDS)
    MeasuringJobs(aws, {1: 0.5})
    cluster = {"instance_type": "ml.p4de.24xlarge", "capacity": "warm-pool"}
    run = write_measured_run(
        tmp_path,
        cluster=cluster | {"keep_alive_period": "30m"},
        budget={"usd": 10, "on_exceed": "stop"},
        evaluation={"prompts": ["a cat"]},
    )
    result = measure(cli, aws, run, "--instances", "1", "--max-runtime", "25m", "--yes")
    assert result.returncode == 0, result.stderr
    [body] = aws.bodies("CreateTrainingJob")
    assert body["StoppingCondition"] == {"MaxRuntimeInSeconds": 1500}
    assert "RetryStrategy" not in body
    assert "KeepAlivePeriodInSeconds" not in body["ResourceConfig"]
    assert body["TrainingJobName"].startswith("demo-measure--256px-1x8x1-")
    keys = aws.client("s3").list_objects_v2(Bucket="ai-bucket", Prefix="demo/")["Contents"]
    assert [key["Key"] for key in keys] == ["demo/cost/measured.json"]


def test_cost_fits_the_runs_cluster_from_one_and_two_nodes(
    cli: Cli, aws: Aws, tmp_path: Path
) -> None:
    aws.make_bucket("ai-bucket", **SHARDS)
    MeasuringJobs(aws, {1: 0.50, 2: 0.52})
    run = write_measured_run(tmp_path)
    before = json.loads(cli("cost", run, "--json").stdout)["stages"][0]
    result = measure(cli, aws, run, "--yes", "--json")
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    first, two = document["speeds"]
    assert first["measurement"]["steps_per_second"] == pytest.approx(2.0)  # without the warm-up
    assert two["measurement"]["steps_per_second"] == pytest.approx(1 / 0.52)
    assert first["gpu_memory_peak"] == 40 * GIB
    assert first["gpu_memory_planned"] > GIB
    assert first["data_wait_share"] == pytest.approx(0.02)
    assert first["doctor"]["network_bytes_per_second"] == 4.1e10
    assert first["cost_usd"] == pytest.approx(900 / 3600 * 27.45, rel=0.2)
    after = json.loads(cli("cost", run, "--json").stdout)["stages"][0]
    assert before["throughput_basis"] == "predicted"
    assert after["throughput_basis"] == "scaling fit"
    # 16 nodes: no faster than one node's step, and little slower than two nodes'.
    assert 1 / 0.70 < after["steps_per_second"] < 1 / 0.50
    spread = after["steps_per_second_high"] / after["steps_per_second_low"]
    earlier = before["steps_per_second_high"] / before["steps_per_second_low"]
    assert spread < 1.5 < earlier
    jobs = [body["TrainingJobName"] for body in aws.bodies("CreateTrainingJob")]
    shown = " ".join(cli("cost", run).stdout.split())
    for nodes, job in zip((1, 2), jobs, strict=True):
        assert f"Speed: measured on {nodes} × ml.p4de.24xlarge (job {job}, 20" in shown
    assert "sm-train measure" not in shown  # nothing left to measure
    checks = json.loads(cli("check", run, "--offline", "--json").stdout)["findings"]
    assert "throughput-unmeasured" not in {finding["code"] for finding in checks}
    planned = json.loads(cli("submit", run, "--dry-run", "--json").stdout)
    assert planned["cost"]["total"]["cost_usd"] == after["cost_usd"]
    # The plan of `submit` uses the record in the bucket, also on another laptop.
    (tmp_path / "demo.measured.json").unlink()
    asked = cli("submit", run, network="loopback", env=aws.environment, stdin="n\n")
    assert "not measured" not in asked.stderr
    assert f"${after['cost_usd']:,.0f}" in asked.stderr


def test_speed_of_another_program_than_the_runs_is_converted(
    cli: Cli, aws: Aws, tmp_path: Path
) -> None:
    """The job's start event says what ran: the speed is of that, and none to state for the run."""
    aws.make_bucket("ai-bucket", **SHARDS)
    MeasuringJobs(aws, {1: 0.50, 2: 0.52}).compiles = True
    run = write_measured_run(tmp_path)
    measured = measure(cli, aws, run, "--yes")
    assert measured.returncode == 0, measured.stderr
    assert "steps_per_second:" not in measured.stdout
    assert "ran another program than the run" in measured.stdout
    [after] = json.loads(cli("cost", run, "--json").stdout)["stages"]
    assert after["throughput_basis"] == "scaled"
    assert after["steps_per_second"] < 1 / 0.52  # not compiled


def test_speeds_of_other_batches_are_no_obstacle(cli: Cli, aws: Aws, tmp_path: Path) -> None:
    """Only a speed that the user gives with --measured must have the run's batch."""
    aws.make_bucket("ai-bucket", **SHARDS)
    MeasuringJobs(aws, {1: 0.50, 2: 0.52})
    run = write_measured_run(tmp_path)
    swept = measure(cli, aws, run, "--instances", "1", "--sweep", "batch=8,16", "--yes")
    assert swept.returncode == 0, swept.stderr
    assert len(aws.bodies("CreateTrainingJob")) == 2
    [priced] = json.loads(cli("cost", run, "--json").stdout)["stages"]
    assert priced["throughput_basis"] == "scaled"
    other = cli("cost", run, "--json", "--set", "stages.256px.per_device_batch_size=4")
    assert other.returncode == 0, other.stderr


def test_a_measured_speed_replaces_the_stated_one_with_a_word(
    cli: Cli, aws: Aws, tmp_path: Path
) -> None:
    aws.make_bucket("ai-bucket", **SHARDS)
    MeasuringJobs(aws, {1: 0.5})
    run = write_measured_run(tmp_path)
    assert measure(cli, aws, run, "--instances", "1", "--yes").returncode == 0
    alone = ("--set", "stages.256px.instances=1", "--set", "stages.256px.steps_per_second=1.1")
    document = json.loads(cli("cost", run, "--json", *alone).stdout)
    [line] = [line for line in document["warnings"] if "steps_per_second" in line]
    assert line.startswith("stages.256px.steps_per_second: 1.1 is not used, because the stage was ")
    [label] = document["measured"]
    assert label.startswith("measured on 1 × ml.p4de.24xlarge")
    # A speed that follows from it for another program is none that was measured.
    changed = ("--set", "training.precision=fp32", "--set", "training.reduce_dtype=fp32")
    [label] = json.loads(cli("cost", run, "--json", *changed).stdout)["measured"]
    assert label.startswith("converted from 2 it/s, measured on 1 × ml.p4de.24xlarge")


def test_policies_of_the_run_allow_its_measurements(cli: Cli, aws: Aws, tmp_path: Path) -> None:
    aws.make_bucket("ai-bucket", **SHARDS)
    MeasuringJobs(aws, {1: 0.5})
    run = write_measured_run(tmp_path, role=f"arn:aws:iam::{ACCOUNT}:role/sm-train")
    aws.policy = json.loads(cli("iam", run, "--json").stdout)["laptop"]
    result = measure(cli, aws, run, "--instances", "1", "--yes")
    assert aws.denied == []
    assert result.returncode == 0, result.stderr
    assert "sagemaker:CreateTrainingJob" in {action for action, *_ in aws.checked}


def test_same_command_finds_its_jobs_again(cli: Cli, aws: Aws, tmp_path: Path) -> None:
    aws.make_bucket("ai-bucket", **SHARDS)
    MeasuringJobs(aws, {1: 0.5, 2: 0.52})
    run = write_measured_run(tmp_path)
    assert measure(cli, aws, run, "--yes").returncode == 0
    (tmp_path / "demo.measured.json").unlink()
    again = measure(cli, aws, run)  # nothing to confirm
    assert again.returncode == 0, again.stderr
    assert len(aws.bodies("CreateTrainingJob")) == 2
    assert "done" in again.stderr
    assert (tmp_path / "demo.measured.json").exists()
    # Another step count is another measurement.
    assert measure(cli, aws, run, "--instances", "1", "--steps", "100", "--yes").returncode == 0
    assert len(aws.bodies("CreateTrainingJob")) == 3


def test_changed_model_does_not_use_the_old_speed(cli: Cli, aws: Aws, tmp_path: Path) -> None:
    aws.make_bucket("ai-bucket", **SHARDS)
    MeasuringJobs(aws, {1: 0.5})
    run = write_measured_run(tmp_path)
    assert measure(cli, aws, run, "--instances", "1", "--yes").returncode == 0
    write_measured_run(tmp_path, training={"compile": False, "ema_decay": 0})
    result = cli("cost", run, "--json")
    document = json.loads(result.stdout)
    assert document["stages"][0]["throughput_basis"] == "predicted"
    assert "is not used: model, objective, resolution, optimizer" in document["warnings"][0]


INTERRUPTIBLE = """
import signal
# A shell starts background commands with SIGINT ignored, and children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
from sm_train.toolkit.cli import main
main()
"""


@pytest.mark.slow
def test_ctrl_c_leaves_the_job_and_the_same_command_continues(
    cli: Cli, aws: Aws, tmp_path: Path
) -> None:
    aws.make_bucket("ai-bucket", **SHARDS)
    jobs = MeasuringJobs(aws, {1: 0.5})
    jobs.status = "InProgress"
    run = write_measured_run(tmp_path)
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTIBLE, "measure", run, "--instances", "1", "--yes"],
        env=clean_environment(tmp_path) | aws.environment,
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    deadline = threading.Timer(DEADLINE, process.kill)
    deadline.start()
    shown = ""
    while "InProgress," not in shown:  # the job's first status: the command waits for its end
        line = process.stderr.readline()
        assert line, shown
        shown += line
    process.send_signal(signal.SIGINT)
    shown += process.communicate()[1]
    deadline.cancel()
    assert process.returncode == 130, shown
    [name] = [body["TrainingJobName"] for body in aws.bodies("CreateTrainingJob")]
    assert f"{name} keeps running and is billed" in shown
    assert "`sm-train stop demo-measure` stops it" in shown
    assert "Traceback" not in shown
    options = {"network": "loopback", "env": aws.environment}
    stopped = cli("stop", "demo-measure", "--region", "us-east-1", **options)
    assert stopped.returncode == 0, stopped.stderr
    assert [body["TrainingJobName"] for body in aws.bodies("StopTrainingJob")] == [name]
    jobs.sagemaker.set_status(name, "Stopped", "MaxRuntimeExceeded")
    again = measure(cli, aws, run, "--instances", "1")
    assert again.returncode == 0, again.stderr
    assert len(aws.bodies("CreateTrainingJob")) == 1


@pytest.mark.slow
def test_failed_job_shows_its_cause_and_the_next_command_starts_another(
    cli: Cli, aws: Aws, tmp_path: Path
) -> None:
    aws.make_bucket("ai-bucket", **SHARDS)
    jobs = MeasuringJobs(aws, {1: 0.5})
    jobs.status, jobs.reason = "Failed", "AlgorithmError: exit code 1"
    run = write_measured_run(tmp_path)
    failed = measure(cli, aws, run, "--yes")
    assert failed.returncode == 6
    line = one_line(failed.stderr)
    assert "out of memory" in line.lower()
    assert "sm-train diagnose demo-measure--256px-1x8x1-" in line
    assert len(aws.bodies("CreateTrainingJob")) == 1  # the larger cluster was not started
    jobs.status, jobs.reason = "Completed", None
    assert measure(cli, aws, run, "--instances", "1", "--yes").returncode == 0
    names = [body["TrainingJobName"] for body in aws.bodies("CreateTrainingJob")]
    assert [name[-4:] for name in names] == ["0001", "0002"]


def test_sweep_measures_other_batches_on_the_smallest_cluster(
    cli: Cli, aws: Aws, tmp_path: Path
) -> None:
    run = write_measured_run(tmp_path)
    result = cli(
        "measure",
        run,
        "--dry-run",
        "--json",
        "--sweep",
        "batch=8,16,100000",
        "--sweep",
        "accumulation=1,2",
    )
    document = json.loads(result.stdout)
    found = [
        (row["instances"], row["per_device_batch_size"], row["gradient_accumulation_steps"])
        for row in document["measurements"]
    ]
    assert found == [(1, 8, 1), (2, 8, 1), (1, 8, 2), (1, 16, 1), (1, 16, 2)]
    assert len(document["skipped"]) == 2
    assert "at batch 100000: needs" in document["skipped"][0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--instances", "0"), "--instances: '0' must be positive numbers such as 1,2"),
        (("--sweep", "lr=1"), "--sweep: 'lr=1' must be batch=N,N or accumulation=N,N"),
        (("--stage", "512px"), "--stage: '512px' is not in the run file; it has 256px"),
        (("--max-runtime", "soon"), "--max-runtime: 'soon' must be a duration"),
        (("--local", "--max-runtime", "5m"), "--max-runtime: limits jobs on SageMaker"),
    ],
)
def test_wrong_options_are_one_line(
    cli: Cli, tmp_path: Path, options: tuple[str, ...], message: str
) -> None:
    result = cli("measure", write_measured_run(tmp_path), "--dry-run", *options)
    assert result.returncode == 2
    assert message in one_line(result.stderr)


def test_names_of_long_runs_fit(cli: Cli, tmp_path: Path) -> None:
    stages = [stage("a-stage-with-a-name", instances=16)]
    run = write_run(tmp_path, name="a-run-with-a-very-long-name-of-30", stages=stages)
    document = json.loads(cli("measure", run, "--dry-run", "--json").stdout)
    for row in document["measurements"]:
        assert len(f"{row['run']}--{row['stage']}-0001") <= 63
        assert not re.search(r"--|-$", row["stage"])
    assert len({row["stage"] for row in document["measurements"]}) == 2


@pytest.mark.slow
def test_local_measurement_trains_and_cost_says_why_it_is_not_used(
    cli: Cli, tmp_path: Path
) -> None:
    """The real thing: shards are read, or generated; nothing but the log remains."""
    document = tiny_run(max_steps=1000).model_dump(mode="json")
    document["data"]["local"] = "shards"
    run = tmp_path / "run.yaml"
    run.write_text(yaml.safe_dump(document))
    write_shards(tmp_path / "shards", shards=2, each=20)
    options = ("--local", "--steps", "10", "--instances", "1")
    result = cli("measure", run, *options, "--json", network="loopback")
    assert result.returncode == 0, result.stderr
    [speed] = json.loads(result.stdout)["speeds"]
    assert speed["input_kind"] == "images"
    [folder] = (tmp_path / "local-runs" / "tiny-measure").glob("8px-*")
    assert not list(folder.rglob("*.safetensors"))
    steps = [event for event in read_events(folder) if event["kind"] == "step"]
    assert [event["step"] for event in steps] == list(range(1, 12))
    warnings = json.loads(cli("cost", run, "--json").stdout)["warnings"]
    assert "it was measured on a CPU, not on ml.g5.xlarge" in warnings[0]
    # Again: the log is there. Without the shards: synthetic images.
    again = cli("measure", run, *options, "--json", network="loopback")
    assert json.loads(again.stdout)["speeds"] == [speed]
    shutil.rmtree(tmp_path / "shards")
    synthetic = cli("measure", run, *options, "--json", network="loopback")
    assert synthetic.returncode == 0, synthetic.stderr
    assert "measuring with synthetic images" in synthetic.stderr
    assert json.loads(synthetic.stdout)["speeds"][0]["input_kind"] == "synthetic images"
