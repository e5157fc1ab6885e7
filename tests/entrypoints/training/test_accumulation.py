"""Gradient accumulation: four micro-batches of two samples equal one batch of eight."""

from __future__ import annotations

import copy
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from sm_train.entrypoints.base.sagemaker_paths import STOP_REQUEST, SageMakerPaths
from sm_train.entrypoints.base.signals import StopSignal
from sm_train.entrypoints.data_loading.loader import open_loader
from sm_train.entrypoints.data_loading.shard_catalog import DataRank, build_catalog
from sm_train.entrypoints.job_interface.events import EventLog
from sm_train.entrypoints.job_interface.job_config import JobConfig, read_job_config
from sm_train.entrypoints.models.builder import build_components
from sm_train.entrypoints.models.objectives import loss
from sm_train.entrypoints.monitoring.heartbeat import HeartbeatReader, HeartbeatWriter, Phase
from sm_train.entrypoints.training.trainer import Trainer
from sm_train.toolkit.records.job_logs import parse_event
from torch import Tensor

from tests.support.cluster.training_jobs import tiny_run, write_shards
from tests.support.run_documents import write_job_file

MICRO_BATCHES = 4
RANK = DataRank(("algo-1",), 0, 0, 1)


@pytest.fixture
def accelerator() -> Iterator[Accelerator]:
    """Restore Accelerate's state and the signal handler, which belong to the process."""
    handler = signal.getsignal(signal.SIGTERM)
    yield Accelerator(cpu=True)
    AcceleratorState._reset_state(True)
    signal.signal(signal.SIGTERM, handler)


def single_step_config(folder: Path) -> JobConfig:
    """Return a run of one step without caption dropout and EMA."""
    config = tiny_run(
        max_steps=1,
        per_device_batch_size=2,
        gradient_accumulation_steps=MICRO_BATCHES,
        caption_dropout=0.0,
        ema_decay=0.0,
    )
    return read_job_config(write_job_file(folder, config), "8px")


def single_step_trainer(folder: Path, accelerator: Accelerator) -> Trainer:
    config = single_step_config(folder)
    paths = SageMakerPaths(folder)
    write_shards(paths.channel("train"), shards=1, each=20)
    catalog = build_catalog(
        paths.channel("train"), None, RANK, lambda value: [value], folder / "walk"
    )
    torch.manual_seed(0)
    components = build_components(config.model, 8, components=None, previous=None)
    events = EventLog(node=0, rank=0)
    return Trainer(config, components, accelerator, paths, events, catalog, RANK)


def test_accumulated_gradient_equals_that_of_the_whole_batch(
    tmp_path: Path,
    accelerator: Accelerator,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Compare the trainer's step with one backward pass over all samples.

    Gradients and the logged norm are compared before clipping and AdamW: both would hide a factor.
    """
    trainer = single_step_trainer(tmp_path, accelerator)
    reference = copy.deepcopy(trainer.state.module)
    gradients: list[Tensor] = []
    update = trainer.state.update

    def record_gradients(norm: Tensor) -> Tensor:
        for parameter in trainer.state.parameters:
            assert parameter.grad is not None
            gradients.append(parameter.grad.clone())
        return update(norm)

    monkeypatch.setattr(trainer.state, "update", record_gradients)
    trainer.run(
        HeartbeatWriter(tmp_path / "heartbeat-0", rank=0, local_rank=0),
        StopSignal(tmp_path / STOP_REQUEST),
    )

    loader = open_loader(
        build_catalog(
            trainer.paths.channel("train"), None, RANK, lambda value: [value], tmp_path / "walk"
        ),
        RANK,
        trainer.config.data,
        resolution=8,
        batch_size=2,
        seed=0,
        decode_workers=0,
        gradient_accumulation_steps=MICRO_BATCHES,
        rng=trainer.components.sample_rng(0),
        tokenize=trainer.components.text_encoders.tokenize,
    )
    total = torch.zeros(())
    for batch, _ in zip(loader, range(MICRO_BATCHES), strict=False):
        target, text = trainer.model_inputs.prepare(batch)
        total = total + loss(reference(target.noisy, target.timesteps, *text), target)
    (total / MICRO_BATCHES).backward()
    for gradient, expected in zip(gradients, reference.parameters(), strict=True):
        torch.testing.assert_close(gradient, expected.grad, rtol=1e-4, atol=1e-6)
    norm = torch.nn.utils.clip_grad_norm_(
        reference.parameters(), trainer.config.training.max_grad_norm
    )
    [step] = [
        event
        for line in capfd.readouterr().out.splitlines()
        if (event := parse_event(line)) and event["kind"] == "step"
    ]
    assert step["gradient_norm"] == pytest.approx(float(norm), rel=1e-4)
    assert step["loss"] == pytest.approx(float(total / MICRO_BATCHES), rel=1e-5)
    torch.optim.AdamW(reference.parameters(), lr=1e-3, weight_decay=0.01).step()
    for weight, expected in zip(trainer.state.parameters, reference.parameters(), strict=True):
        torch.testing.assert_close(weight, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.integration
def test_heartbeat_enters_data_and_step_for_each_micro_batch(
    tmp_path: Path, accelerator: Accelerator
) -> None:
    trainer = single_step_trainer(tmp_path, accelerator)
    trainer.run(
        HeartbeatWriter(tmp_path / "heartbeat-0", rank=0, local_rank=0),
        StopSignal(tmp_path / STOP_REQUEST),
    )
    sample = HeartbeatReader(tmp_path / "heartbeat-0").sample()
    assert (sample.phase, sample.step) == (Phase.FINISH, 1)
    # Data and step of each micro-batch, the checkpoint, the end.
    assert sample.sequence == 2 * MICRO_BATCHES + 2
