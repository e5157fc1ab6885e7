"""Accumulation: four passes of two images are one pass of eight."""

from __future__ import annotations

import copy
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from sm_train.entrypoints.common.events import EventLog
from sm_train.entrypoints.common.job_config import JobConfig, read_job_config
from sm_train.entrypoints.common.sagemaker_paths import SageMakerPaths
from sm_train.entrypoints.common.signals import StopSignal
from sm_train.entrypoints.data.loader import Loader
from sm_train.entrypoints.data.shard_catalog import DataRank, build_catalog
from sm_train.entrypoints.models.builder import build
from sm_train.entrypoints.models.objectives import loss
from sm_train.entrypoints.monitoring.heartbeat import HeartbeatReader, HeartbeatWriter, Phase
from sm_train.entrypoints.training.trainer import Trainer

from tests.support.cluster.training_jobs import tiny_run, write_shards
from tests.support.run_documents import write_job_file

PASSES = 4


@pytest.fixture
def accelerator() -> Iterator[Accelerator]:
    """Accelerate's state and the stop's signal handler are the process's: put both back."""
    handler = signal.getsignal(signal.SIGTERM)
    yield Accelerator(cpu=True)
    AcceleratorState._reset_state(True)
    signal.signal(signal.SIGTERM, handler)


def one_step(folder: Path) -> JobConfig:
    """A run of one step without the two things that differ by chance from pass to pass."""
    config = tiny_run(
        max_steps=1,
        per_device_batch_size=2,
        gradient_accumulation_steps=PASSES,
        caption_dropout=0.0,
        ema_decay=0.0,
    )
    return read_job_config(write_job_file(folder, config), "8px")


def test_four_passes_of_two_are_one_of_eight(tmp_path: Path, accelerator: Accelerator) -> None:
    """The trainer's optimizer step, and the same by hand with one backward pass over all eight."""
    settings = one_step(tmp_path)
    directories = SageMakerPaths(tmp_path)
    write_shards(directories.channel("train"), shards=1, each=20)
    seat = DataRank(("algo-1",), 0, 0, 1)
    catalogue = build_catalog(
        directories.channel("train"), None, seat, lambda said: [said], tmp_path / "walk"
    )
    torch.manual_seed(0)
    parts = build(settings.model, 8, components=None, previous=None)
    events = EventLog(node=0, rank=0)
    trainer = Trainer(settings, parts, accelerator, directories, events, catalogue, seat)
    module = copy.deepcopy(trainer.state.module)
    trainer.run(HeartbeatWriter(tmp_path / "heartbeat-0", rank=0, local_rank=0), StopSignal())
    sign = HeartbeatReader(tmp_path / "heartbeat-0").sample()
    assert (sign.phase, sign.step) == (Phase.FINISH, 1)
    # Data and step of each pass, the checkpoint, the end.
    assert sign.sequence == 2 * PASSES + 2

    loader = Loader(
        catalogue,
        seat,
        settings.data,
        resolution=8,
        batch_size=2,
        seed=0,
        decode_workers=0,
        rng=parts.draws(0),
        tokenize=parts.text.tokenize,
    )
    total = torch.zeros(())
    for batch, _ in zip(loader, range(PASSES), strict=False):
        task, text = trainer.model_inputs.prepare(batch)
        total = total + loss(module(task.noisy, task.timesteps, *text), task)
    (total / PASSES).backward()
    torch.nn.utils.clip_grad_norm_(module.parameters(), settings.training.max_grad_norm)
    torch.optim.AdamW(module.parameters(), lr=1e-3, weight_decay=0.01).step()
    for ours, by_hand in zip(trainer.state.parameters, module.parameters(), strict=True):
        torch.testing.assert_close(ours, by_hand, rtol=1e-4, atol=1e-6)
