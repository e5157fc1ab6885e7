"""Builds trainers, jobs and batches of known content for the benchmarks of training."""

from __future__ import annotations

import io
import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch
import webdataset
from accelerate import Accelerator
from data_config import DATA_CONFIG
from PIL import Image
from sm_train.entrypoints.base.sagemaker_paths import SageMakerPaths
from sm_train.entrypoints.data_loading.batches import Batch
from sm_train.entrypoints.data_loading.shard_catalog import DataRank, build_catalog
from sm_train.entrypoints.job_interface.events import EventLog
from sm_train.entrypoints.job_interface.job_config import (
    AlertsConfig,
    CheckpointConfig,
    DoctorConfig,
    EvaluationConfig,
    ExpectedPerformance,
    HeartbeatConfig,
    JobConfig,
    LrScheduleConfig,
    ModelConfig,
    OptimizerConfig,
    StageConfig,
    TrainingConfig,
)
from sm_train.entrypoints.models.builder import ModelComponents, build_components
from sm_train.entrypoints.models.components import read_preset
from sm_train.entrypoints.training.trainer import Trainer

SIDE, BATCH = 16, 8
RATE, CLIP, DECAY = 1e-4, 1.0, 0.999

CONFIG = JobConfig(
    run="bench",
    license=None,
    entry=None,
    entry_args=(),
    backend="auto",
    data=DATA_CONFIG,
    model=ModelConfig(
        "digits", None, zero_terminal_snr=False, min_snr_gamma=None, timestep_shift=None
    ),
    stage=StageConfig(
        "bench",
        SIDE,
        BATCH,
        1,
        10**9,
        RATE,
        "none",
        activation_checkpointing=False,
        init_from="ema",
        optimizer_state="reset",
    ),
    training=TrainingConfig(
        "fp32",
        reduce_dtype="fp32",
        vae_precision="auto",
        compile=False,
        seed=0,
        warmup_steps=0,
        optimizer=OptimizerConfig("adamw", None, None, 0.01, None, {}),
        lr_schedule=LrScheduleConfig("constant", 0.0, 0.1, {}),
        objective=None,
        max_grad_norm=CLIP,
        caption_dropout=0.0,
        ema_decay=DECAY,
        ema_start=0,
        max_nonfinite_steps=10,
        max_rollbacks=1,
        decode_workers=0,
        log_every=50,
    ),
    evaluation=EvaluationConfig(10**9, (), 1, 1.0),
    checkpoint=CheckpointConfig(10**9, 1),
    heartbeat=HeartbeatConfig(30, 120, 1200, "warn"),
    alerts=AlertsConfig(None, None, None, "warning"),
    doctor=DoctorConfig("off", 120, 1.5),
    expected=ExpectedPerformance(
        "local",
        steps_per_second=None,
        speed_source=None,
        usd_per_instance_hour=None,
    ),
)
"""A stage of the demo's model in fp32, to be changed with :func:`configure`."""


def configure(
    preset: str,
    resolution: int,
    batch: int,
    *,
    precision: str = "bf16",
    content: str | None = None,
    **training: object,
) -> JobConfig:
    """Return the configuration of one stage; ``training`` are fields of its training section.

    ``content`` is the JSON of a preset that does not ship with sm-train.
    """
    return replace(
        CONFIG,
        model=replace(CONFIG.model, preset=preset, preset_content=content),
        stage=replace(CONFIG.stage, resolution=resolution, per_device_batch_size=batch),
        training=replace(CONFIG.training, precision=precision, **training),  # type: ignore[arg-type]
    )


def with_small_encoders(preset: str) -> str:
    """Return the JSON of a preset whose text encoders have one layer each.

    Precomputed text needs an encoder for the empty caption alone; the network is unchanged.
    """
    document = read_preset(preset)
    for encoder in document["text_encoders"]:
        layers = "num_layers" if "num_layers" in encoder else "num_hidden_layers"
        encoder[layers] = 1
    return json.dumps(document)


def write_shards(folder: Path, images: int, side: int = SIDE) -> None:
    """Write one shard of ``images`` small images of noise with captions."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    with webdataset.TarWriter(str(folder / "0.tar")) as writer:
        for number in range(images):
            content = io.BytesIO()
            Image.fromarray(rng.integers(0, 255, (side, side, 3), np.uint8)).save(content, "PNG")
            caption = f"a digit {number}"
            writer.write({"__key__": f"{number:03d}", "png": content.getvalue(), "txt": caption})


def write_document(config: JobConfig, folder: Path) -> Path:
    """Write the job file that a bundle holds; return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "job.json"
    path.write_text(json.dumps({config.stage.name: asdict(config)}))
    return path


def make_trainer(
    accelerator: Accelerator,
    folder: Path,
    config: JobConfig | None = None,
    components: ModelComponents | None = None,
) -> Trainer:
    """Return the trainer of a stage whose shards are written below ``folder``.

    ``components`` None builds them.
    """
    config = config or CONFIG
    paths = SageMakerPaths(folder)
    channel = paths.channel("train")
    if not channel.is_dir():
        write_shards(channel, 64)
    rank = DataRank(("algo-1",), 0, 0, 1)
    catalog = build_catalog(channel, None, rank, lambda value: [value], folder / "walk")
    components = components or build_components(
        config.model, config.stage.resolution, components=None, previous=None
    )
    events = EventLog(node=0, rank=0, stream=io.StringIO())
    return Trainer(config, components, accelerator, paths, events, catalog, rank)


def synthetic_batch(trainer: Trainer, resolution: int, batch: int, *, online: bool) -> Batch:
    """Return a batch of noise: images and token ids, or their precomputed latents and text."""
    components = trainer.components
    moments = None
    if components.vae is not None:
        side = resolution // components.vae_scale_factor
        moments = torch.zeros(batch, 2 * components.network.config.in_channels, side, side).half()
    online_batch = Batch(
        pixels=torch.randint(0, 255, (batch, resolution, resolution, 3), dtype=torch.uint8),
        captions=["a word"] * batch,
        position=trainer.loader.position,
        bad_samples=(),
        is_new=np.ones(batch, bool),
        origins=tuple((0, number) for number in range(batch)),
        names=("a name",) * batch,
        timestep_uniform=np.linspace(0.01, 0.99, batch),
        dropout_uniform=np.ones(batch),
        noise=torch.randn(components.sample_rng(0).shape(batch, resolution, resolution)),
        tokens=tuple(ids.numpy() for ids in components.text_encoders.tokenize(["a word"] * batch)),
        sizes=torch.tensor([[resolution, resolution, 0, 0]] * batch),
    )
    if online:
        return online_batch
    text = components.text_encoders.encode(
        [ids.to(trainer.device) for ids in components.text_encoders.tokenize(["a word"])]
    )
    states, pooled = (
        None
        if tensor is None
        else tensor.detach().half().cpu().repeat(batch, *tensor[0].ndim * [1])
        for tensor in (text.states, text.pooled)
    )
    return replace(online_batch, moments=moments, text=states, pooled=pooled)
