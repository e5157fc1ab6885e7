"""Nodes that start as a manifest's pods do: data and checkpoints in S3, no shared folder."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path

import psutil
import pytest
from sm_train.entrypoints.storage.storage import Storage, open_storage
from sm_train.entrypoints.storage.store import S3Access
from sm_train.estimators.bundle.bundle import build_bundle
from sm_train.estimators.config.schema import RunConfig
from sm_train.estimators.manifests.manifest import Manifest, build_manifest
from sm_train.toolkit.records.job_logs import Event, parse_event

from tests.conftest import Aws, clean_environment
from tests.estimators.manifests.documents import IMAGE, environment, only, pods
from tests.support.cluster.training_jobs import free_port, tiny_run, write_shards
from tests.support.deadline import DEADLINE

BUCKET = "ai-bucket"
PREFIX = "tiny/checkpoints/8px"


def run_file(nodes: int, *, max_steps: int, checkpoint_every: int = 2) -> RunConfig:
    """Return a run whose pods copy data and checkpoints from and to S3, and install nothing."""
    config = tiny_run(max_steps=max_steps, checkpoint_every=checkpoint_every)
    document = config.model_dump(mode="json")
    document["stages"][0] |= {"instances": nodes, "per_device_batch_size": 4 // nodes}
    document["cluster"] |= {"network_isolation": True, "image": IMAGE}
    document["kubernetes"] = {"data": "sync", "checkpoints": "sync"}
    document["data"]["index"] = False
    return RunConfig.model_validate(document)


@dataclass
class Node:
    """One node's process, its folder in place of /opt/ml, and the lines that it has printed."""

    process: subprocess.Popen[str]
    folder: Path
    lines: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._printed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._printed:
                self.lines.append(line)
                self._printed.notify_all()
        with self._printed:
            self._printed.notify_all()

    def wait_for(self, text: str) -> None:
        with self._printed:
            found = self._printed.wait_for(
                lambda: any(text in line for line in self.lines) or not self._reader.is_alive(),
                DEADLINE,
            )
        assert found, f"{text!r} was not printed:\n{self.text}"
        assert text in self.text, self.text

    @property
    def text(self) -> str:
        return "".join(self.lines)

    def events(self, kind: str) -> list[Event]:
        found = (parse_event(line) for line in self.lines)
        return [event for event in found if event is not None and event["kind"] == kind]

    def end(self) -> int:
        """Return the exit code, once everything that was printed has been read."""
        code = self.process.wait(DEADLINE)
        self._reader.join(DEADLINE)
        return code

    def kill_ranks(self) -> None:
        """Kill the processes that train, as the kernel does that runs out of memory."""
        for child in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if "--stage" in child.cmdline() and "RANK" in child.environ():
                    child.kill()

    def kill(self) -> None:
        """Lose the node: all of its processes at once."""
        with contextlib.suppress(psutil.NoSuchProcess):
            tree = psutil.Process(self.process.pid)
            for child in [tree, *tree.children(recursive=True)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()


class Cluster:
    """Starts the pods of a manifest as processes, each with folders of its own."""

    def __init__(self, folder: Path, aws: Aws) -> None:
        self._folder, self._aws = folder, aws
        self._started: list[Node] = []
        self._attempts = 0

    def start(self, config: RunConfig, *, take_over: bool = False) -> list[Node]:
        """Start a stage's pods on new nodes, with the variables that Kubeflow Trainer sets."""
        self._attempts += 1
        bundle = build_bundle(config, None)
        manifest = _manifest(config, take_over=take_over)
        variables = environment(pods(manifest)[0])
        nodes = config.stages[0].instances
        port = free_port()
        started = []
        for rank in range(nodes):
            base = self._folder / f"attempt-{self._attempts}" / f"node-{rank}"
            code = base / "input" / "data" / "code"
            code.mkdir(parents=True)
            _unpack(bundle.archive, code)
            platform = {
                "PET_NNODES": str(nodes),
                "PET_NODE_RANK": str(rank),
                "PET_MASTER_ADDR": "localhost",
                "PET_MASTER_PORT": str(port),
                "JOB_COMPLETION_INDEX": str(rank),
                "SAGEMAKER_BASE_DIR": str(base),
                "ACCELERATE_USE_CPU": "true",
                "OMP_NUM_THREADS": "1",
            }
            environ = clean_environment(self._folder) | variables | self._aws.environment | platform
            environ.pop("PYTHONPATH", None)
            process = subprocess.Popen(
                [sys.executable, "-m", "sm_train.entrypoints.clusters.start"],
                cwd=code,
                env=environ,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            started.append(Node(process, base))
        self._started += started
        return started

    def close(self) -> None:
        for node in self._started:
            node.kill()
            node.process.wait()

    def watch(
        self, config: RunConfig, variables: dict[str, str]
    ) -> subprocess.CompletedProcess[str]:
        """Run the container of the manifest's CronJob once."""
        code = self._folder / "watch" / "input" / "data" / "code"
        code.mkdir(parents=True, exist_ok=True)
        _unpack(build_bundle(config, None).archive, code)
        pod = only(_manifest(config), "CronJob")["spec"]["jobTemplate"]["spec"]["template"]
        environ = clean_environment(self._folder) | environment(pod) | self._aws.environment
        environ.pop("PYTHONPATH", None)
        return subprocess.run(
            [sys.executable, "-m", "sm_train.entrypoints.clusters.watch_once"],
            cwd=code,
            env=environ | variables,
            capture_output=True,
            text=True,
            check=False,
            timeout=DEADLINE,
        )


def _manifest(config: RunConfig, *, take_over: bool = False) -> Manifest:
    return build_manifest(
        config,
        config.stages[0],
        "trainjob",
        build_bundle(config, None),
        region="us-east-1",
        file=None,
        take_over=take_over,
    )


def _unpack(bundle: bytes, folder: Path) -> None:
    with tarfile.open(fileobj=BytesIO(bundle)) as archive:
        archive.extractall(folder, filter="data")


def checkpoint_storage(aws: Aws, monkeypatch: pytest.MonkeyPatch) -> Storage:
    """Return the stage's checkpoint folder in S3, reached from the test's own process."""
    for name, value in aws.environment.items():
        monkeypatch.setenv(name, value)
    return open_storage(f"s3://{BUCKET}/{PREFIX}", S3Access(region="us-east-1"))


@contextmanager
def cluster_with_shards(folder: Path, aws: Aws) -> Iterator[Cluster]:
    """Yield a cluster whose bucket holds shards; its nodes end with the context."""
    write_shards(folder / "shards", shards=4, each=4)
    aws.make_bucket(BUCKET)
    for shard in sorted((folder / "shards").iterdir()):
        aws.client("s3").upload_file(str(shard), BUCKET, f"shards/{shard.name}")
    running = Cluster(folder, aws)
    try:
        yield running
    finally:
        running.close()
