"""A manifest's pods as real containers: its images' commands, variables and volumes.

Containers share a network without a route to others, in which the names of Kubernetes' headless
service resolve. Folders take the place of S3 (the init container's ``aws`` copies from one), of the
file system with the data and of the shared volume. What only a cluster has is missing: EFA, GPUs,
and the operator, whose variables are set here as Kubeflow Trainer sets them.
"""

from __future__ import annotations

import re
import secrets
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from sm_train.estimators.bundle.bundle import Bundle, build_bundle
from sm_train.estimators.config.schema import RunConfig
from sm_train.estimators.manifests.manifest import Manifest, build_manifest
from sm_train.toolkit.demo.digits import write_digits
from sm_train.toolkit.records.job_logs import Event, parse_event
from sm_train.toolkit.run_file.run_file import load_recorded

from tests.conftest import Cli
from tests.estimators.manifests.documents import pods
from tests.support.capabilities import skip_or_fail
from tests.support.cluster.demo_runs import demo_document, latest_step
from tests.support.deadline import DEADLINE

pytestmark = pytest.mark.integration

IMAGE = "sm-train-local"
NAME = "digits-digits"
KILLED, STOPPED = 137, 143

AWS_CLI = """\
#!/bin/sh
# aws s3 cp --only-show-errors s3://BUCKET/KEY FILE
exec cp "/s3/${4#s3://}" "$5"
"""


def docker(*arguments: str) -> str:
    result = subprocess.run(["docker", *arguments], capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"docker {' '.join(arguments)}: {result.stderr}"
    return result.stdout.strip()


def run_file(nodes: int, max_steps: int) -> RunConfig:
    """Return the demo with a checkpoint every 10 steps, its data and checkpoints on volumes."""
    document = demo_document(nodes, max_steps)
    document["kubernetes"] = {
        "image": IMAGE,
        "pod_patch": {"spec": {"initContainers": [{"name": "fetch-code", "image": IMAGE}]}},
        "data": "file-system",
        "file_system": {"claim": "data", "s3": "s3://my-bucket/digits/"},
        "checkpoints": "volume",
        "checkpoint_volume": {"claim": "checkpoints"},
    }
    return load_recorded(document, (), "the demo")


@dataclass
class Pod:
    """A running pod: the container that trains, after its init container."""

    container: str

    def logs(self) -> str:
        result = subprocess.run(
            ["docker", "logs", self.container], capture_output=True, text=True, check=True
        )
        return result.stdout + result.stderr

    def events(self, kind: str) -> list[Event]:
        found = (parse_event(line) for line in self.logs().splitlines())
        return [event for event in found if event is not None and event["kind"] == kind]

    def wait_for(self, pattern: str) -> None:
        deadline = time.monotonic() + DEADLINE
        while not re.search(pattern, self.logs()):
            running = docker("inspect", "-f", "{{.State.Running}}", self.container)
            assert running == "true", f"{pattern!r} was not printed:\n{self.logs()}"
            assert time.monotonic() < deadline, f"{pattern!r} was not printed:\n{self.logs()}"
            time.sleep(0.5)

    def end(self) -> int:
        """Return the exit code, after the container has ended."""
        result = subprocess.run(
            ["docker", "wait", self.container],
            capture_output=True,
            text=True,
            check=True,
            timeout=DEADLINE,
        )
        return int(result.stdout)


class Cluster:
    """A network of pods, and the folders behind their volumes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.network = f"sm-train-{secrets.token_hex(4)}"
        docker("network", "create", "--internal", self.network)
        self._containers: list[str] = []
        self._pods = 0
        (folder / "bin").mkdir()
        (folder / "bin" / "aws").write_text(AWS_CLI)
        (folder / "bin" / "aws").chmod(0o755)
        for name in ("s3", "checkpoints"):
            (folder / name).mkdir()

    def stage_code(self, manifest: Manifest, bundle: Bundle) -> Path:
        file = self.folder / "s3" / manifest.code_uri.removeprefix("s3://")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(bundle.archive)
        return file

    def start(self, config: RunConfig) -> list[Pod]:
        """Start a stage's pods as Kubeflow Trainer does: on new nodes, all at once."""
        bundle = build_bundle(config, None)
        manifest = build_manifest(
            config, config.stages[0], "trainjob", bundle, region="us-east-1", file=None
        )
        self.stage_code(manifest, bundle)
        [template] = pods(manifest)
        nodes = config.stages[0].instances
        for rank in range(nodes):
            assert self.run_init_container(template["spec"], self._work(rank)) == 0
        return [self._run(template["spec"], rank, nodes) for rank in range(nodes)]

    def _work(self, rank: int) -> Path:
        if rank == 0:
            self._pods += 1
        folder = self.folder / f"work-{self._pods}-{rank}"
        folder.mkdir()
        return folder

    def run_init_container(self, spec: dict[str, Any], work: Path) -> int:
        [container] = spec["initContainers"]
        mounts = [
            "--volume",
            f"{self.folder}/bin/aws:/usr/local/bin/aws:ro",
            "--volume",
            f"{self.folder}/s3:/s3:ro",
        ]
        command = self._command(container, {"work": work}, spec, ["--rm", *mounts])
        return subprocess.run(["docker", "run", *command], check=False).returncode

    def _run(self, spec: dict[str, Any], rank: int, nodes: int) -> Pod:
        [container] = spec["containers"]
        host = f"{NAME}-node-0-{rank}"
        variables = {
            "PET_NNODES": str(nodes),
            "PET_NPROC_PER_NODE": "1",
            "PET_NODE_RANK": str(rank),
            "PET_MASTER_ADDR": f"{NAME}-node-0-0.{NAME}",
            "PET_MASTER_PORT": "29500",
            "JOB_COMPLETION_INDEX": str(rank),
        }
        sources = {
            "work": self.folder / f"work-{self._pods}-{rank}",
            "data": self.folder / "packed",
            "checkpoints": self.folder / "checkpoints",
        }
        options = [
            "--detach",
            f"--network={self.network}",
            f"--hostname={host}",
            f"--network-alias={host}.{NAME}",
            "--shm-size=256m",
            *(f"--env={name}={value}" for name, value in variables.items()),
        ]
        started = docker("run", *self._command(container, sources, spec, options))
        self._containers.append(started)
        return Pod(started)

    def _command(
        self,
        container: dict[str, Any],
        sources: dict[str, Path],
        spec: dict[str, Any],
        options: list[str],
    ) -> list[str]:
        """Return the arguments of ``docker run`` for a container of the pod ``spec``."""
        declared = {volume["name"] for volume in spec["volumes"]}
        for mount in container["volumeMounts"]:
            assert mount["name"] in declared
            if mount["name"] != "dshm":  # --shm-size
                mode = "ro" if mount.get("readOnly") else "rw"
                source = sources[mount["name"]]
                options = [*options, "--volume", f"{source}:{mount['mountPath']}:{mode}"]
        for variable in container["env"]:
            options = [*options, "--env", f"{variable['name']}={variable['value']}"]
        entrypoint, *arguments = container["command"]
        return [*options, "--entrypoint", entrypoint, container["image"], *arguments]

    def close(self) -> None:
        for container in self._containers:
            subprocess.run(
                ["docker", "rm", "-f", "-v", container], capture_output=True, check=False
            )
        subprocess.run(["docker", "network", "rm", self.network], capture_output=True, check=False)


@pytest.fixture
def cluster(cli: Cli, tmp_path: Path) -> Iterator[Cluster]:
    try:
        docker("image", "inspect", IMAGE)
    except (OSError, AssertionError) as error:
        skip_or_fail(f"no container engine with the image {IMAGE}; see engine.sh ({error})")
    write_digits(tmp_path / "digits")
    assert cli("pack", "digits", "packed", "--shard-size", "240KB").returncode == 0
    running = Cluster(tmp_path)
    try:
        yield running
    finally:
        running.close()


def losses(pod: Pod) -> dict[int, float]:
    return {event["step"]: event["loss"] for event in pod.events("step")}


def test_init_container_refuses_other_code(cluster: Cluster, tmp_path: Path) -> None:
    config = run_file(1, 10)
    bundle = build_bundle(config, None)
    manifest = build_manifest(
        config, config.stages[0], "pytorchjob", bundle, region="us-east-1", file=None
    )
    staged = cluster.stage_code(manifest, bundle)
    [master] = pods(manifest)
    work = tmp_path / "work"
    work.mkdir()
    assert cluster.run_init_container(master["spec"], work) == 0
    staged.write_bytes(bundle.archive + b"\0")
    assert cluster.run_init_container(master["spec"], work) == 1


@pytest.mark.slow
def test_two_pods_train_lose_a_node_stop_and_resume_on_one(
    cluster: Cluster, tmp_path: Path
) -> None:
    checkpoints = tmp_path / "checkpoints" / "digits" / "digits"
    first, second = cluster.start(run_file(2, 100_000))
    first.wait_for('"kind": "checkpoint"')
    first.wait_for('"kind": "step", .* "step": 1[3-9],')
    # Each pod reads its own half of the shards, of which the mount shows all.
    shares = [
        re.search(r"channel train: (\d+) files, part (\d) of 2 \(/mnt/data/shards\)", pod.logs())
        for pod in (first, second)
    ]
    shards = len(list((tmp_path / "packed" / "shards").glob("*.tar")))
    assert [share and share[2] for share in shares] == ["1", "2"]
    assert sum(int(share[1]) for share in shares if share) == shards
    docker("kill", second.container)
    assert second.end() == KILLED
    assert first.end() not in (0, STOPPED)
    before = losses(first)
    saved = latest_step(checkpoints)

    # JobSet's failure policy starts all pods again, on new nodes.
    first, second = cluster.start(run_file(2, 100_000))
    first.wait_for(f'"kind": "step", .* "step": {saved + 2},')
    [start] = first.events("start")
    assert (start["nodes"], start["backend"]) == (2, "gloo")
    assert start["resumed_from_step"] == saved
    repeated = before.keys() & losses(first).keys()
    for step in repeated:
        assert losses(first)[step] == pytest.approx(before[step], rel=1e-3)
    # What `kubectl delete` does: SIGTERM to the first process of every pod.
    for pod in (first, second):
        docker("kill", "--signal", "TERM", pod.container)
    assert [first.end(), second.end()] == [STOPPED, STOPPED], first.logs()
    [end] = first.events("end")
    assert end["reason"] == "sigterm"
    stopped = latest_step(checkpoints)
    assert stopped == end["step"] == max(losses(first))

    [alone] = cluster.start(run_file(1, stopped + 3))
    assert alone.end() == 0, alone.logs()
    assert alone.events("start")[0]["resumed_from_step"] == stopped
    assert min(losses(alone)) == stopped + 1
    assert max(losses(alone)) == stopped + 3
    assert (checkpoints / "final" / "model_index.json").exists()
