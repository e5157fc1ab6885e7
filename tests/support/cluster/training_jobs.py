"""Real training jobs of a tiny model: shards, a run, a job's folders and processes."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from sm_train.entrypoints.job_interface.checkpoint_layout import (
    MARKER,
    CheckpointMarker,
    is_shard_file,
    step_folder_name,
)
from sm_train.estimators.bundle.bundle import build_bundle
from sm_train.estimators.bundle.user_code import UserCode
from sm_train.estimators.config.schema import RunConfig
from sm_train.toolkit.records.job_logs import parse_event
from sm_train.toolkit.submit.local.emulated_checkpoint_sync import CheckpointSync

from tests.support.cluster import torch_server
from tests.support.deadline import DEADLINE
from tests.support.run_documents import job_document, run

PYTHON = os.environ.get("TRAIN_PYTHON", sys.executable)
"""The Python that trains; `make test-torch-2.5` sets one with the newest SMDDP image's PyTorch."""


def png(colour: int, side: int = 8) -> bytes:
    content = io.BytesIO()
    pixels = np.full((side, side, 3), colour % 256, np.uint8)
    Image.fromarray(pixels).save(content, "PNG")
    return content.getvalue()


def write_shard(path: Path, samples: dict[str, dict[str, bytes]]) -> None:
    """Write a tar of samples: key → extension → content."""
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for key, members in samples.items():
            for extension, content in members.items():
                entry = tarfile.TarInfo(f"{key}.{extension}")
                entry.size = len(content)
                tar.addfile(entry, io.BytesIO(content))


def sample(number: int) -> dict[str, bytes]:
    return {"png": png(number), "txt": f"a grey of {number}".encode()}


def write_shards(folder: Path, shards: int, each: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for shard in range(shards):
        numbers = range(shard * each, (shard + 1) * each)
        samples = {f"{number:04d}": sample(number) for number in numbers}
        write_shard(folder / f"shard-{shard:03d}.tar", samples)


def tiny_run(*, max_steps: int, **training: Any) -> RunConfig:
    """Return a run of the digits model that is small enough for two CPU cores."""
    stage_keys = {
        "per_device_batch_size",
        "gradient_accumulation_steps",
        "learning_rate",
        "sharding",
        "activation_checkpointing",
        "resolution",
    }
    stage = {key: training.pop(key) for key in list(training) if key in stage_keys}
    checkpoint = {"every_steps": training.pop("checkpoint_every", 100), "keep_last": 3}
    evaluation = training.pop("evaluation", {})
    trackers = training.pop("trackers", [])
    in_fp8 = training.get("precision") == "fp8"
    data = {"uri": "s3://ai-bucket/shards/"} | training.pop("data", {})
    return RunConfig.model_validate(
        run(
            name="tiny",
            data=data,
            model={"preset": training.pop("preset", "digits")} | training.pop("model", {}),
            stages=[
                {
                    "name": "8px",
                    "resolution": 8,
                    "instances": 2,
                    "per_device_batch_size": 4,
                    "max_steps": max_steps,
                    "learning_rate": 1e-3,
                    "sharding": "none",
                }
                | stage
            ],
            training={
                "precision": "fp32",
                "warmup_steps": 0,
                "decode_workers": 0,
                "log_every": 1,
                "ema_decay": 0.9,
            }
            | training,
            checkpoint=checkpoint,
            evaluation=evaluation,
            trackers=trackers,
            # An L4 has fp8.
            cluster={"instance_type": "ml.g6.xlarge" if in_fp8 else "ml.g5.xlarge"},
        )
    )


def priced_document() -> dict[str, Any]:
    """A tiny run's job configuration by stage, at $36 per instance-hour."""
    document = job_document(tiny_run(max_steps=9))
    document["8px"]["expected"]["usd_per_instance_hour"] = 36.0
    return document


@dataclass
class Job:
    """One node's folders with the unpacked bundle, for one or more processes.

    ``prefix`` takes the place of the S3 prefix of checkpoints, and is shared by a job's nodes.
    """

    base: Path
    config: RunConfig
    prefix: Path | None = None
    code: UserCode | None = None

    def __post_init__(self) -> None:
        self.bundle = self.base / "bundle"
        bundle = build_bundle(self.config, None, self.code)
        self.entry = bundle.entry
        with tarfile.open(fileobj=io.BytesIO(bundle.archive)) as tar:
            tar.extractall(self.bundle, filter="data")

    @property
    def train_channel(self) -> Path:
        return self.base / "input" / "data" / "train"

    @property
    def checkpoints(self) -> Path:
        """What is in S3 once the job has ended."""
        return self.prefix or self.base / "s3"

    @property
    def node_checkpoints(self) -> Path:
        """The node's own folder, which no other node sees."""
        return self.base / "checkpoints"

    @property
    def failure(self) -> str:
        path = self.base / "output" / "failure"
        return path.read_text() if path.exists() else ""

    def sync(self, **options: Any) -> CheckpointSync:
        """Download what is in S3 to the node's folder, as for a new instance."""
        return sync_nodes([self], **options)

    def start(
        self,
        processes: int = 1,
        launch: Sequence[str] = (),
        *,
        sync: CheckpointSync | None = None,
        script: str | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> Processes:
        """Start the job; ``launch`` are torchrun's options for a job of several nodes.

        ``sync`` uploads the checkpoints of all nodes; by default this node's alone. ``script`` is
        copied to the bundle and runs instead of its entry script.
        """
        sync = sync or self.sync()
        return Processes(self, processes, launch, sync, script, environment or {})

    def run(self, processes: int = 1) -> tuple[int, list[dict[str, Any]], str]:
        """Run to the end; return exit code, events and output."""
        with self.start(processes) as running:
            text = "".join(running.lines())
            code = running.process.wait(timeout=DEADLINE)
        return code, [event for line in text.splitlines() if (event := parse_event(line))], text


def sync_nodes(jobs: Sequence[Job], **options: Any) -> CheckpointSync:
    """Download what is in S3 to the nodes' new folders, and return what will upload from them."""
    for job in jobs:
        # A test may have put a small file system in place of the folder.
        if not job.node_checkpoints.is_symlink():
            shutil.rmtree(job.node_checkpoints, ignore_errors=True)
    folders = [job.node_checkpoints for job in jobs]
    return CheckpointSync(jobs[0].checkpoints, folders, **options)


class Processes:
    """A job's processes under torchrun; leaving the context kills them and ends the uploads."""

    def __init__(
        self,
        job: Job,
        processes: int,
        launch: Sequence[str],
        sync: CheckpointSync,
        script: str | None,
        environment: Mapping[str, str],
    ) -> None:
        self.sync = sync
        if script is None:
            script = job.entry
        else:
            # In the bundle's folder it imports the bundle's packages, as train.py does.
            shutil.copy(script, job.bundle)
            script = Path(script).name
        command = [script]
        if processes > 1 or launch:
            launch = launch or ("--master_port", str(free_port()))
            command = ["-m", "torch.distributed.run", *launch]
            command += ["--nproc_per_node", str(processes), script]
        self.process = start_python(
            [*command, "--stage", job.config.stages[0].name],
            cwd=job.bundle,
            env={
                **os.environ,
                **torch_server.IMPORT_TIME_ENVIRONMENT,
                "SAGEMAKER_BASE_DIR": str(job.base),
                "GLOO_SOCKET_IFNAME": "lo",
                "PYTHONUNBUFFERED": "1",
                **environment,
            },
        )
        self._deadline = time.monotonic() + DEADLINE
        self.output: list[str] = []
        """The lines that were read so far."""

    def __enter__(self) -> Processes:
        self.sync.start()
        return self

    def __exit__(self, *_: object) -> None:
        for pid in self.workers():
            with contextlib.suppress(ProcessLookupError):  # has just ended
                os.kill(pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()
        self.sync.finish()

    def lines(self) -> Iterator[str]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output.append(line)
            assert time.monotonic() < self._deadline, f"the job takes too long:\n{self.tail()}"
            yield line

    def tail(self) -> str:
        """Return the last lines of the output so far."""
        return "".join(self.output[-40:])

    def wait_for(self, kind: str, **fields: Any) -> dict[str, Any]:
        """Read the output until an event of this kind with these fields."""
        output = []
        for line in self.lines():
            output.append(line)
            event = parse_event(line)
            if event and event["kind"] == kind and fields.items() <= event.items():
                return event
        raise AssertionError(f"no {kind} {fields} in:\n{''.join(output[-40:])}")

    def workers(self) -> list[int]:
        """The training processes' ids: the children of torchrun's agent."""
        import psutil

        try:
            return [child.pid for child in psutil.Process(self.process.pid).children()]
        except psutil.NoSuchProcess:
            return []


def start_python(
    arguments: Sequence[str], *, cwd: Path, env: Mapping[str, str]
) -> subprocess.Popen[str] | torch_server.ForkedProcess:
    """Run ``python ARGUMENTS`` with one pipe for its output; forked, unless TRAIN_PYTHON is set."""
    if sys.executable == PYTHON:
        return torch_server.start(arguments, cwd=cwd, env=env)
    return subprocess.Popen(
        [PYTHON, *arguments],
        cwd=cwd,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def create_nodes(
    folder: Path, config: RunConfig, count: int, code: UserCode | None = None
) -> list[Job]:
    """Return the nodes of one job, which share nothing but the prefix of checkpoints."""
    return [
        Job(folder / f"algo-{number + 1}", config, folder / "s3", code) for number in range(count)
    ]


@contextlib.contextmanager
def start_nodes(
    jobs: list[Job], processes: int, *, sync: CheckpointSync | None = None, **options: Any
) -> Iterator[list[Processes]]:
    """Start one job on several nodes; ``options`` are those of :meth:`Job.start`."""
    hosts = [f"algo-{number}" for number in range(1, len(jobs) + 1)]
    port = str(free_port())
    sync = sync or sync_nodes(jobs)
    with contextlib.ExitStack() as stack:
        running = []
        for rank, (job, host) in enumerate(zip(jobs, hosts, strict=True)):
            config = job.base / "input" / "config"
            config.mkdir(parents=True, exist_ok=True)
            document = {"current_host": host, "hosts": hosts}
            (config / "resourceconfig.json").write_text(json.dumps(document))
            launch = ["--nnodes", str(len(jobs)), "--node_rank", str(rank)]
            launch += ["--master_addr", "127.0.0.1", "--master_port", port]
            running.append(stack.enter_context(job.start(processes, launch, sync=sync, **options)))
        yield running


def run_nodes(jobs: list[Job], processes: int, **options: Any) -> list[dict[str, Any]]:
    """Run one job on several nodes, each with its own folders; return the events of all nodes."""
    with start_nodes(jobs, processes, **options) as running:
        with ThreadPoolExecutor(len(jobs)) as pool:
            reads = [pool.submit(lambda node: "".join(node.lines()), node) for node in running]
        if any(read.exception() for read in reads):
            # The node that fails first is often not the one with the cause.
            pytest.fail("\n".join(f"node {n}: {node.tail()}" for n, node in enumerate(running)))
        texts = [read.result() for read in reads]
        codes = [node.process.wait(timeout=DEADLINE) for node in running]
    assert codes == [0] * len(jobs), "\n".join(texts)
    lines = "".join(texts).splitlines()
    return [event for line in lines if (event := parse_event(line))]


def free_port() -> int:
    """Return a free port that no outgoing connection gets before a job binds it.

    The system takes ports of connections from 32768 on (ip_local_port_range). The next port is
    free, too: the launcher waits there for the other nodes.
    """
    while True:
        port = random.SystemRandom().randrange(12_000, 32_000)
        with (
            socket.socket() as probe,
            socket.socket() as next_probe,
            contextlib.suppress(OSError),
        ):
            probe.bind(("", port))
            next_probe.bind(("", port + 1))
            return port


def gradient_norms(events: list[dict[str, Any]]) -> dict[int, float]:
    return {event["step"]: event["gradient_norm"] for event in events if event["kind"] == "step"}


def losses(events: list[dict[str, Any]]) -> dict[int, float]:
    return {event["step"]: event["loss"] for event in events if event["kind"] == "step"}


def shard_digests(job: Job, step: int) -> dict[str, str]:
    """Return the digest of each tensor file of a checkpoint, by its name."""
    marker = CheckpointMarker.parse(
        (job.checkpoints / step_folder_name(step) / MARKER).read_bytes()
    )
    digests = {file.name: file.blake3 for file in marker.files if is_shard_file(file.name)}
    assert digests
    return digests
