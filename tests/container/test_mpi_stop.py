"""SIGTERM on the SMDDP route: AWS's container toolkit starts MPI in two containers.

Each container gets the entrypoint and hyperparameters of a real request, and process 1 gets the
signal, as on SageMaker. AWS's toolkit (sagemaker-training) then uses sshd and Open MPI to start two
ranks in each. Only AWS can prove the rest: smddprun, SMDDP on GPUs, EFA.
"""

from __future__ import annotations

import json
import subprocess
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from sm_train.entrypoints.base.sagemaker_paths import STOP_REQUEST
from sm_train.entrypoints.checkpoints.checkpoint_files import latest_complete
from sm_train.entrypoints.job_interface.checkpoint_layout import (
    MARKER,
    CheckpointMarker,
    is_shard_file,
    parse_step_folder,
    step_folders,
)
from sm_train.estimators.bundle.bundle import build_bundle
from sm_train.estimators.config.schema import RunConfig
from sm_train.estimators.request.launch_plan import launch_plan
from sm_train.estimators.request.training_request import TrainingRequest, training_request
from sm_train.toolkit.records.job_logs import Event, parse_event
from sm_train.toolkit.submit.local.emulated_checkpoint_sync import CheckpointSync

from tests.container.containers_support import docker
from tests.support.capabilities import skip_or_fail
from tests.support.cluster.training_jobs import tiny_run, write_shards
from tests.support.deadline import DEADLINE
from tests.support.run_documents import ECR

pytestmark = pytest.mark.integration

HOSTS = ("algo-1", "algo-2")
IMAGE = "sm-train-mpi"
RANKS_PER_HOST = 2  # lines of mpi/nvidia-smi


@pytest.fixture(autouse=True)
def image() -> None:
    try:
        docker("image", "inspect", IMAGE)
    except (OSError, subprocess.CalledProcessError) as error:
        skip_or_fail(f"no container engine with the image {IMAGE}; see engine.sh ({error})")


def smddp_run() -> RunConfig:
    config = tiny_run(max_steps=10**6, checkpoint_every=10**6)
    cluster = {"instance_type": "ml.p4de.24xlarge", "backend": "smddp", "image": ECR}
    return RunConfig.model_validate(
        config.model_dump()
        # Isolated, so that the toolkit takes the code from a channel instead of S3.
        | {"cluster": cluster | {"network_isolation": True}, "doctor": {"mode": "off"}}
    )


def write_platform_files(base: Path, request: TrainingRequest, host: str, archive: bytes) -> None:
    """Write what SageMaker lays out below /opt/ml before it starts the container."""
    for folder in ("input/config", "input/data/code", "output/data", "model", "checkpoints"):
        (base / folder).mkdir(parents=True)
    (base / "input" / "data" / "code" / "sourcedir.tar.gz").write_bytes(archive)
    number = HOSTS.index(host)
    write_shards(base / "input" / "data" / "train", shards=1, each=40)
    [shard] = (base / "input" / "data" / "train").iterdir()
    shard.rename(shard.with_name(f"shard-{number:03d}.tar"))
    documents: dict[str, Any] = {
        "hyperparameters": request["HyperParameters"],
        "resourceconfig": {
            "current_host": host,
            "hosts": HOSTS,
            "network_interface_name": "eth0",
            "current_instance_type": "ml.p4de.24xlarge",
        },
        "inputdataconfig": {"train": {"TrainingInputMode": "FastFile"}},
    }
    for name, document in documents.items():
        (base / "input" / "config" / f"{name}.json").write_text(json.dumps(document))


@dataclass(frozen=True)
class Cluster:
    """The containers of one job, by host, and each host's folder in place of /opt/ml.

    ``sync`` uploads the checkpoints of both to ``prefix``.
    """

    containers: dict[str, str]
    folders: dict[str, Path]
    prefix: Path
    sync: CheckpointSync

    def terminate(self) -> None:
        """Send SIGTERM to process 1 of every container, as SageMaker does."""
        for container in self.containers.values():
            docker("kill", "--signal", "TERM", container)

    def follow(self, until: Callable[[str], bool]) -> list[str]:
        """Read the first host's log until a line matches."""
        lines = []
        with subprocess.Popen(
            ["docker", "logs", "--follow", self.containers[HOSTS[0]]],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as log:
            try:
                assert log.stdout is not None
                for line in log.stdout:
                    lines.append(line)
                    if until(line):
                        return lines
            finally:
                log.kill()
        raise AssertionError("the job ended:\n" + "".join(lines[-60:]))

    def wait(self) -> tuple[list[int], list[Event]]:
        """Wait until the containers exit; return their codes and the events of the first."""
        codes = []
        for container in self.containers.values():
            waited = subprocess.run(
                ["docker", "wait", container],
                capture_output=True,
                text=True,
                check=True,
                timeout=DEADLINE,
            )
            codes.append(int(waited.stdout))
        log = docker("logs", self.containers[HOSTS[0]])
        return codes, [event for line in log.splitlines() if (event := parse_event(line))]


@contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    """Start both containers of a job as SageMaker starts them."""
    config = smddp_run()
    [stage] = config.stages
    bundle = build_bundle(config, None)
    launch = launch_plan(config, stage, IMAGE)
    assert launch.route == "smddp"
    request = training_request(
        config, stage, launch, bundle, region="us-east-1", staged="s3://ai-bucket/staged"
    )
    algorithm = request["AlgorithmSpecification"]
    [entrypoint] = algorithm["ContainerEntrypoint"]
    name = f"mpi-{uuid.uuid4().hex[:12]}"
    environment = request["Environment"] | {
        "ACCELERATE_USE_CPU": "true",
        "GLOO_SOCKET_IFNAME": "eth0",
        "OMP_NUM_THREADS": "1",
        "TRAINING_JOB_NAME": request["TrainingJobName"],
        # Open MPI asks for these where the toolkit starts it from a shell of sshd.
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }
    variables = [word for pair in environment.items() for word in ("--env", "=".join(pair))]
    with ExitStack() as stack:
        docker("network", "create", name)
        stack.callback(docker, "network", "rm", name)
        folders = {host: folder / host for host in HOSTS}
        for host in HOSTS:
            write_platform_files(folders[host], request, host, bundle.archive)
        sync = CheckpointSync(folder / "s3", [folders[host] / "checkpoints" for host in HOSTS])
        sync.start()
        stack.callback(sync.finish)
        containers = {}
        for host in HOSTS:
            stack.callback(docker, "rm", "--force", "--volumes", f"{name}-{host}")
            containers[host] = docker(
                *("run", "--detach", "--name", f"{name}-{host}", "--shm-size", "1g"),
                *("--hostname", f"ip-10-0-0-{host[-1]}", "--network", name),
                *("--network-alias", host, "--volume", f"{folders[host]}:/opt/ml"),
                *(*variables, "--entrypoint", entrypoint),
                *(IMAGE, *algorithm["ContainerArguments"]),
            ).strip()
        yield Cluster(containers, folders, folder / "s3", sync)


def assert_checkpointed(job: Cluster) -> None:
    """All ranks of both hosts must have saved the step at which the job ended, and exit with 0."""
    codes, events = job.wait()
    assert codes == [0, 0]
    [start] = [event for event in events if event["kind"] == "start"]
    assert start["world_size"] == RANKS_PER_HOST * len(HOSTS)
    [end] = [event for event in events if event["kind"] == "end"]
    assert end["reason"] == "sigterm"
    job.sync.finish()
    uploaded = latest_complete(job.prefix, lambda *_: None)
    assert uploaded is not None
    assert uploaded.step == end["step"]
    shards = set()
    for folder in job.folders.values():
        [saved] = step_folders(folder / "checkpoints")
        assert parse_step_folder(saved.name) == end["step"]
        marker = CheckpointMarker.parse((saved / MARKER).read_bytes())
        shards |= {path.name for path in saved.iterdir() if is_shard_file(path.name)}
    assert shards == {file.name for file in marker.files if is_shard_file(file.name)}


def test_sigterm_during_training_ends_with_a_checkpoint(tmp_path: Path) -> None:
    with cluster(tmp_path) as job:
        steps = 0

        def several_steps(line: str) -> bool:
            nonlocal steps
            event = parse_event(line)
            steps += bool(event and event["kind"] == "step")
            return steps > 5

        job.follow(several_steps)
        job.terminate()
        assert_checkpointed(job)


@pytest.mark.slow
def test_sigterm_before_training_and_again_ends_with_a_checkpoint(tmp_path: Path) -> None:
    """The first one arrives while the toolkit waits for the other host, the second later."""
    with cluster(tmp_path) as job:
        job.terminate()
        job.follow(lambda line: "mpirun" in line)
        assert (job.folders[HOSTS[0]] / STOP_REQUEST).is_file()
        job.terminate()
        assert_checkpointed(job)
