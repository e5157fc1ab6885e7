"""``doctor --canary``: two jobs that train, stop, resume and end, and the report of what worked."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, get_args

import pytest
from sm_train.cost.instances import instance_type
from sm_train.estimators.config.load import load_run
from sm_train.toolkit.base.errors import UserError
from sm_train.toolkit.probes.doctor.canary_report import FactCode
from sm_train.toolkit.probes.doctor.canary_run import derive_canary

from tests.conftest import Aws, Cli
from tests.support.cluster.training_jobs import write_shards
from tests.support.deadline import DEADLINE
from tests.support.job_lifecycle import FakeSageMaker
from tests.support.run_documents import stage
from tests.support.run_files import one_line, write_run

pytestmark = pytest.mark.integration

SHARDS = {f"shards/{index}.tar": b"x" for index in range(4)} | {"index.parquet": b"x"}
VPC = {"subnets": ["subnet-0123456789abcdef0"], "security_groups": ["sg-0123456789abcdef0"]}
EFA = {"instance_type": "ml.p5.48xlarge", "vpc": VPC}


@dataclass
class Training:
    """Training as it happens on SageMaker: what a job logs and stores when it starts and stops."""

    aws: Aws
    sagemaker: FakeSageMaker
    stored_step: int = 50
    stopped_step: int | None = 73
    """None: SIGTERM does not reach the training."""
    resumes: bool = True
    fails_to_start: bool = False
    findings: list[str] = field(default_factory=list)

    def install(self) -> None:
        started, stopped = self.aws.response_filters["CreateTrainingJob"], self.sagemaker._stop

        def start(response: dict[str, Any]) -> dict[str, Any] | None:
            started(response)
            self.start(response["TrainingJobArn"].rsplit("/", 1)[1])
            return response

        def stop(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
            response = stopped(body)
            self.stop(body["TrainingJobName"])
            return response

        self.aws.response_filters["CreateTrainingJob"] = start
        self.aws.responses["StopTrainingJob"] = stop

    def start(self, job: str) -> None:
        if self.fails_to_start:
            reason = "AlgorithmError: s3://ai-bucket/demo: no such file, role 210987654321"
            self.sagemaker.set_status(job, "Failed", reason=reason)
            return
        first = job.endswith("0001")
        step = 0 if first or not self.resumes else self.newest
        self._log(job, "start", resumed_from_step=step, nodes=2, world_size=8, backend="nccl")
        self._log(job, "epoch", samples=80, batches=5, unseen=0)
        sentence = "network at 97 % of expected on i-0123456789abcdef0"
        self._log(
            job,
            "doctor",
            network_bytes_per_second=11.3e9,
            sentence=sentence,
            findings=self.findings,
            parts={"shard reads": [2.1e9, None, "B/s"]},
        )
        self._log(job, "step", step=step + 10, data_wait_share=0.02)
        if first:
            self._log(job, "checkpoint", step=self.stored_step, ago=9)
            self.sagemaker.checkpoint("canary", self.stored_step, run=run_of(job))
            return
        self._log(job, "end", step=step + 20, reason="done")
        key = f"{run_of(job)}/output/{job}/output/model/unet/x.safetensors"
        self.aws.client("s3").put_object(Bucket="ai-bucket", Key=key, Body=b"x")
        self.sagemaker.set_status(job, "Completed")

    def stop(self, job: str) -> None:
        if self.stopped_step is not None:
            self.sagemaker.checkpoint("canary", self.stopped_step, run=run_of(job))
            self._log(job, "end", step=self.stopped_step, reason="sigterm", ago=0)
        self.sagemaker.set_status(job, "Stopped")

    @property
    def newest(self) -> int:
        return self.stopped_step or self.stored_step

    def _log(self, job: str, kind: str, **fields: Any) -> None:
        self.sagemaker.log_event(job, kind, **fields)


def run_of(job: str) -> str:
    return job.partition("--")[0]


KEY = "arn:aws:kms:us-east-1:345678901234:key/1234abcd-12ab-34cd-56ef-1234567890ab"


@pytest.fixture
def training(aws: Aws) -> Training:
    aws.make_bucket("ai-bucket", **SHARDS)
    encrypt_by_default(aws, {"SSEAlgorithm": "AES256"})  # the default encryption of a new bucket
    return Training(aws, FakeSageMaker(aws))


def encrypt_by_default(aws: Aws, encryption: dict[str, str]) -> None:
    rules = {"Rules": [{"ApplyServerSideEncryptionByDefault": encryption}]}
    aws.client("s3").put_bucket_encryption(
        Bucket="ai-bucket", ServerSideEncryptionConfiguration=rules
    )


@dataclass
class Canary:
    """A finished ``doctor --canary``."""

    code: int
    document: dict[str, Any]
    report: str
    stderr: str

    def states(self) -> dict[str, str]:
        return {fact["code"]: fact["state"] for fact in self.document["facts"]}


RunCanary = Callable[..., Canary]


@pytest.fixture
def canary(cli: Cli, training: Training, tmp_path: Path) -> RunCanary:
    def run(*options: str, **changes: Any) -> Canary:
        training.install()
        file = write_run(tmp_path, **{"cluster": EFA} | changes)
        done = cli(
            *("doctor", file, "--canary", "--yes", "--json", "--interval", "1s", *options),
            network="loopback",
            env=training.aws.environment,
        )
        [report] = (tmp_path / "canary-reports").glob("*.md")
        return Canary(done.returncode, json.loads(done.stdout), report.read_text(), done.stderr)

    return run


def test_canary_confirms_each_step_with_its_figures(canary: RunCanary, training: Training) -> None:
    done = canary()
    assert done.code == 0, done.stderr
    assert set(done.states().values()) == {"confirmed"}
    assert tuple(done.states()) == get_args(FactCode)
    for figure in ("2 of 2 nodes, 8 ranks", "11.3 GB/s", "stored step 73, resumed from 73"):
        assert figure in done.report, figure
    table = done.report.partition("| the platform reports |")[2]
    [status] = re.findall(r"\| TrainingJobStatus \| (\w+) \| (\w+) \|", table)
    assert status == ("InProgress", "Stopped")
    assert "| SecondaryStatusTransitions | " in table
    first, second = training.aws.bodies("CreateTrainingJob")
    assert first["CheckpointConfig"] == second["CheckpointConfig"]
    assert first["ResourceConfig"]["InstanceCount"] == 2
    assert first["StoppingCondition"]["MaxRuntimeInSeconds"] == 1800
    assert "at most $" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("default", "state"), [(KEY, "confirmed"), (None, "failed")])
def test_canary_observes_how_a_stored_checkpoint_is_encrypted(
    canary: RunCanary, training: Training, default: str | None, state: str
) -> None:
    """SageMaker's upload names no key: the bucket's default encryption decides."""
    if default is not None:
        encrypt_by_default(training.aws, {"SSEAlgorithm": "aws:kms", "KMSMasterKeyID": default})
    done = canary(output_kms_key=KEY)
    assert done.states()["checkpoint-encryption"] == state
    assert ("aws:kms with" if default else "AES256; the run names") in done.report
    assert KEY not in done.report


def test_report_names_neither_account_nor_bucket_nor_run(
    canary: RunCanary, training: Training
) -> None:
    done = canary(name="secret-project")
    for text in (done.report, json.dumps(done.document)):
        for secret in ("secret-project", "ai-bucket", "210987654321", "0123456789abcdef0"):
            assert secret not in text, secret


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "failed"),
    [
        ({"stopped_step": None}, {"sigterm"}),
        ({"resumes": False}, {"restore"}),
        ({"findings": ["transport-sockets"]}, {"transport"}),
        ({"findings": ["transport-no-rdma"]}, {"transport"}),
    ],
)
def test_step_that_does_not_work_is_reported(
    canary: RunCanary, training: Training, changes: dict[str, Any], failed: set[str]
) -> None:
    for name, value in changes.items():
        setattr(training, name, value)
    done = canary()
    assert done.code == 3
    assert {code for code, state in done.states().items() if state == "failed"} == failed
    assert all(code in one_line(done.stderr) for code in failed)


def test_job_that_does_not_start_ends_the_canary(canary: RunCanary, training: Training) -> None:
    training.fails_to_start = True
    done = canary()
    assert done.code == 3
    assert done.states()["image-start"] == "failed"
    assert "AlgorithmError: s3://<bucket>/<run>: no such file, role <account>" in done.report
    assert len(training.aws.bodies("CreateTrainingJob")) == 1


def test_price_is_shown_and_confirmed_first(cli: Cli, training: Training, tmp_path: Path) -> None:
    run = write_run(tmp_path, cluster=EFA)
    options = {"network": "loopback", "env": training.aws.environment}
    declined = cli("doctor", run, "--canary", stdin="n\n", **options)
    assert declined.returncode == 130
    assert re.search(r"two jobs on 2 × ml\.g\S+ in us-east-1, by torchrun", declined.stderr)
    assert training.aws.bodies("CreateTrainingJob") == []
    dry = cli("doctor", run, "--canary", "--dry-run")
    assert dry.returncode == 0, dry.stderr
    document = json.loads(dry.stdout)
    assert 0 < document["cost_usd"] < document["max_cost_usd"]
    [request] = document["requests"]
    assert request["VpcConfig"]["SecurityGroupIds"] == ["sg-0123456789abcdef0"]


@pytest.mark.slow
def test_canary_runs_on_two_emulated_nodes(cli: Cli, tmp_path: Path) -> None:
    """Real processes: two nodes train, get SIGTERM, and two others resume and end."""
    write_shards(tmp_path / "packed" / "shards", shards=4, each=20)
    run = write_run(
        tmp_path,
        model={"preset": "digits"},
        data={"uri": "s3://ai-bucket/shards/", "local": "packed/shards", "index": False},
        stages=[stage(resolution=8)],
        training={"precision": "fp32", "decode_workers": 0},
        cluster={"instance_type": "ml.g5.xlarge"},
        doctor={"timeout": 30},
    )
    done = cli(
        *("doctor", run, "--canary", "--local", "--json", "--interval", "1s"),
        network="loopback",
        timeout=4 * DEADLINE,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(done.stdout)
    assert document["platform"] == "local"
    assert {fact["state"] for fact in document["facts"]} == {"confirmed"}
    [report] = (tmp_path / "canary-reports").glob("*.md")
    assert "2 emulated nodes on one machine: proves nothing about AWS" in report.read_text()


def derive(tmp_path: Path, instance: str | None = None, **changes: Any) -> Any:
    config = load_run(write_run(tmp_path, **changes))
    now = datetime(2026, 11, 22)
    return derive_canary(config, config.stages[-1], "us-east-1", now, instance)


@pytest.mark.parametrize(
    ("cluster", "efa", "max_usd"),
    [
        ({"instance_type": "ml.p5.48xlarge"}, True, 8),
        ({"instance_type": "ml.g5.2xlarge"}, False, 2),
        ({"instance_type": "ml.p4de.24xlarge", "backend": "smddp"}, True, 30),
    ],
)
def test_canary_runs_on_cheap_instances_of_the_same_route_and_network(
    tmp_path: Path, cluster: dict[str, Any], efa: bool, max_usd: float
) -> None:
    derived = derive(tmp_path, cluster=cluster)
    assert instance_type(derived.config.cluster.instance_type).supports_efa == efa
    assert derived.price.usd < max_usd
    assert derived.stage.instances == 2
    assert derived.launch.route == ("smddp" if "backend" in cluster else "torchrun")


@pytest.mark.parametrize("sharding", ["full_shard", "hybrid_shard"])
@pytest.mark.parametrize("preset", ["sd2", "sdxl", "dit-xl", "mmdit-8b"])
def test_canary_of_every_preset_is_a_valid_run(tmp_path: Path, preset: str, sharding: str) -> None:
    stages = [stage("a"), stage("b", sharding=sharding, optimizer_state="keep")]
    cluster = {"instance_type": "ml.p5.48xlarge", "capacity": "spot", "max_wait": "6d"}
    derived = derive(
        tmp_path,
        name="a-very-long-name-of-a-run-with-many-words",
        model={"preset": preset},
        stages=stages,
        cluster=cluster,
    )
    assert derived.config.model.preset.startswith("tiny-")
    assert derived.stage.sharding == sharding
    assert derived.config.cluster.capacity == "on-demand"
    assert derived.resuming(70).stages[0].max_steps == 90


def test_instance_type_of_another_route_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--instance-type: backend: smddp does not run on ml\.g5"):
        derive(
            tmp_path,
            "ml.g5.xlarge",
            cluster={"instance_type": "ml.p4de.24xlarge", "backend": "smddp"},
        )


def test_unknown_instance_type_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--instance-type: 'ml\.x9' is not a known"):
        derive(tmp_path, "ml.x9")
