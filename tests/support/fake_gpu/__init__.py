"""Training steps on a GPU that does not exist, in a separate process.

The process loads a CUDA device without memory or kernels (:mod:`.device`). It runs the product's
training loop (:mod:`.program`) on fake tensors: with shapes, types and devices, without content.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

from tests.support.capabilities import link_optional_package
from tests.support.deadline import DEADLINE


@dataclass(frozen=True)
class FakeRun:
    """A run of ``steps`` optimizer steps, seen from rank 0 of ``world_size``, 8 to a node.

    ``latents`` feeds precomputed latents instead of images. ``lora_rank`` is that of an adapter, 0
    to train all weights. With ``track_memory`` the report has ``peak_bytes``.
    """

    preset: str
    resolution: int
    per_device_batch_size: int = 1
    gradient_accumulation_steps: int = 1
    steps: int = 2
    sharding: str = "none"
    activation_checkpointing: bool = False
    world_size: int = 1
    latents: bool = False
    track_memory: bool = False
    lora_rank: int = 0
    text_encoders: str = "auto"


@dataclass(frozen=True)
class HostSync:
    """``count`` times, ``function`` of the product made the CPU wait for the GPU."""

    cause: str
    function: str
    count: int


@dataclass(frozen=True)
class Collective:
    """``count`` collectives of ``bytes`` over ``ranks`` that ``function`` of the product started.

    ``bytes`` is the size of the whole vector, as in nccl-tests. ``function`` is "backward" for
    those that autograd starts.
    """

    name: str
    function: str
    ranks: int
    bytes: int
    count: int


@dataclass(frozen=True)
class FakeReport:
    """What happened in a run's steps, without the preparation before the first one.

    ``peak_bytes`` are by kind of memory, as PyTorch's tracker names it, and "Total".
    """

    syncs: list[HostSync]
    collectives: list[Collective]
    peak_bytes: dict[str, int]


@dataclass(frozen=True)
class FakeGpuResult:
    """``probes`` is what the recorder reports for known operations, ``reports`` one per run."""

    probes: dict[str, str]
    reports: list[FakeReport]


def run_on_fake_gpu(runs: Sequence[FakeRun], timeout: float = DEADLINE) -> FakeGpuResult:
    """Run the product's training loop on a fake GPU; skip the test without a C++ compiler."""
    if shutil.which("g++") is None:
        pytest.skip("a fake CUDA device needs g++")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    environment.pop("ACCELERATE_USE_CPU", None)
    with tempfile.TemporaryDirectory() as packages:
        if any(run.lora_rank for run in runs):
            link_optional_package("peft", Path(packages))
        path = (packages, environment.get("PYTHONPATH"))
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, path))
        finished = subprocess.run(
            [sys.executable, "-m", "tests.support.fake_gpu.program"],
            input=json.dumps([asdict(run) for run in runs]),
            capture_output=True,
            text=True,
            env=environment,
            timeout=timeout,
            check=False,
        )
    assert finished.returncode == 0, finished.stderr[-4000:]
    result = json.loads(finished.stdout.splitlines()[-1])
    reports = [
        FakeReport(
            [HostSync(**sync) for sync in report["syncs"]],
            [Collective(**collective) for collective in report["collectives"]],
            report["peak_bytes"],
        )
        for report in result["reports"]
    ]
    return FakeGpuResult(result["probes"], reports)
