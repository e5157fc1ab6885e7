"""One optimizer step: ours against a bare loop, bare Accelerate, and a loop like diffusers' own.

The model is the demo's (U-Net and text encoder, trained together), on batches that are in memory.
The loops differ in what surrounds forward pass, backward pass, clipping and AdamW: noise, EMA,
schedule, metrics. The loop like diffusers' examples/text_to_image/train_text_to_image.py prepares
everything with Accelerate, gathers the loss every step and keeps an EMAModel. The variants are
interleaved; the output is medians, spread, the median of each one's overhead over the bare loop of
its round, and CPU time, which other programs on the machine disturb less. Forward and backward pass
vary by more than the overhead, so the last line compares the time outside of them. Ours clips
within AdamW, which saves one pass over the gradients.

On a GPU our step then trains sd2 in bf16 at 256 and 512 pixels, from precomputed latents and with
autoencoder and text encoder online. Images/s and MFU are compared with published figures at 512:
127 images/s for an H100 from precomputed latents (MLPerf Training 4.0, NVIDIA) and 48 for one
online (awsome-distributed-training, 385.3 images/s for a p5). Name a preset to run this on a CPU.

    python benchmarks/step.py [PRESET]
"""

from __future__ import annotations

import copy
import io
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pytest
import torch
import webdataset
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from diffusers.training_utils import EMAModel
from PIL import Image
from sm_train.entrypoints.common.events import EventLog
from sm_train.entrypoints.common.job_config import (
    AlertsConfig,
    CheckpointConfig,
    DataConfig,
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
from sm_train.entrypoints.common.sagemaker_paths import SageMakerPaths
from sm_train.entrypoints.data.batches import Batch
from sm_train.entrypoints.data.shard_catalog import DataRank, build_catalog
from sm_train.entrypoints.models.builder import build_components
from sm_train.entrypoints.models.objectives import DiffusionTarget
from sm_train.entrypoints.models.objectives import loss as diffusion_loss
from sm_train.entrypoints.models.pipeline import Text
from sm_train.entrypoints.monitoring.heartbeat import HeartbeatWriter
from sm_train.entrypoints.planning.mfu import mfu_meter
from sm_train.entrypoints.training.metrics import StepMetricsWindow
from sm_train.entrypoints.training.trainer import Trainer
from torch import Tensor, nn

ROUNDS, STEPS, BATCH, SIDE = 30, 8, 8, 16
RATE, CLIP, DECAY = 1e-4, 1.0, 0.999
SIZES = {256: 128, 512: 32}
PUBLISHED = {False: 127.0, True: 385.3 / 8}
"""Images/s of one H100 at 512 px, by whether the autoencoder runs online."""

CONFIG = JobConfig(
    run="bench",
    license=None,
    entry=None,
    entry_args=(),
    backend="auto",
    data=DataConfig(
        "png",
        "txt",
        "center",
        "bilinear",
        "fast",
        "ignore",
        aspect_buckets=False,
        max_bad_fraction=0.01,
    ),
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
    heartbeat=HeartbeatConfig(30, 120, 1200, "warn", 60),
    alerts=AlertsConfig(None, None, None, "warning"),
    doctor=DoctorConfig("off", 120, 1.5),
    expected=ExpectedPerformance(
        "local",
        steps_per_second=None,
        speed_source=None,
        usd_per_instance_hour=None,
    ),
)

Step = Callable[[], Any]


def main() -> None:
    """Measure on the GPU or the CPU."""
    with tempfile.TemporaryDirectory() as folder:
        accelerator = Accelerator()
        trainer = make_trainer(accelerator, Path(folder))
        batches = [next(iter(trainer.loader)) for _ in range(4)]
        inputs = [trainer.model_inputs.prepare(batch) for batch in batches]
        module = trainer.state.module
        base, _ = copied(module)
        variants: dict[str, Step] = {
            "bare loop": repeated(bare(base, inputs)),
            "bare Accelerate": repeated(bare_accelerate(module, inputs, accelerator)),
            "like diffusers": repeated(like_diffusers(module, inputs, accelerator)),
            "sm-train": ours(trainer, batches),
        }
        weights = sum(parameter.numel() for parameter in trainer.state.parameters)
        print(
            f"{accelerator.device}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, "
            f"{weights / 1e6:.1f} million weights, batch of {BATCH}"
        )
        compare(variants, accelerator.device)
        rest = [
            time_outside_passes(steps, model)
            for steps, model in (
                (variants["sm-train"], trainer.model),
                (variants["bare loop"], base),
            )
        ]
        print(
            f"outside of forward and backward: sm-train {rest[0]:.2f} ms, bare loop "
            f"{rest[1]:.2f} ms, a difference of {rest[0] - rest[1]:.2f} ms"
        )
    if preset := (sys.argv[1:] or (["sd2"] if torch.cuda.is_available() else [])):
        for resolution, batch in SIZES.items():
            for online in (False, True):
                throughput(accelerator, preset[0], resolution, batch, online=online)


def throughput(
    accelerator: Accelerator, preset: str, resolution: int, batch: int, *, online: bool
) -> None:
    """Print images/s and MFU of our step on batches that are in memory."""
    AcceleratorState._reset_state()
    accelerator = Accelerator(mixed_precision="bf16")
    config = replace(
        CONFIG,
        model=replace(CONFIG.model, preset=preset),
        stage=replace(CONFIG.stage, resolution=resolution, per_device_batch_size=batch),
        training=replace(CONFIG.training, precision="bf16"),
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(accelerator, Path(folder), config)
        stream = cycle([synthetic_batch(trainer, resolution, batch, online=online)])
        window = StepMetricsWindow(trainer.device)
        heartbeat = HeartbeatWriter(Path(folder) / "heartbeat-0", rank=0, local_rank=0)
        busy = trainer._create_busy_timer(heartbeat)
        steps = STEPS if trainer.device.type == "cuda" else 2
        for number in range(2 * steps):
            if number == steps:
                _synchronize(trainer.device)
                started = time.perf_counter()
            trainer._train_step(stream, window, heartbeat, busy)
        _synchronize(trainer.device)
    images = steps * batch / (time.perf_counter() - started)
    meter = mfu_meter(config, trainer.device)
    mfu = f", MFU {meter.mfu(images, 1):.1%}" if meter else ""
    published = PUBLISHED[online] if (preset, resolution) == ("sd2", 512) else None
    ratio = f", {images / published:.2f} × {published:.0f} published" if published else ""
    kind = "autoencoder online" if online else "precomputed latents"
    print(f"{preset}, {resolution} px, batch {batch}, {kind}: {images:.1f} images/s{mfu}{ratio}")


def synthetic_batch(trainer: Trainer, resolution: int, batch: int, *, online: bool) -> Batch:
    """Return a batch of noise: images and token ids, or their precomputed latents and text."""
    components = trainer.components
    text = components.text_encoders.encode(
        [ids.to(trainer.device) for ids in components.text_encoders.tokenize(["a word"])]
    )
    side = resolution // components.vae_scale_factor
    moments = torch.zeros(batch, 2 * components.network.config.in_channels, side, side).half()
    online_batch = Batch(
        torch.randint(0, 255, (batch, resolution, resolution, 3), dtype=torch.uint8),
        ["a word"] * batch,
        trainer.loader.position,
        (),
        0,
        tuple((0, n) for n in range(batch)),
        np.linspace(0.01, 0.99, batch),
        np.ones(batch),
        torch.randn(components.sample_rng(0).shape(batch, resolution, resolution)),
        tokens=tuple(ids.numpy() for ids in components.text_encoders.tokenize(["a word"] * batch)),
    )
    if online:
        return online_batch
    states, pooled = (
        None if tensor is None else tensor.detach().half().cpu().expand(batch, *tensor.shape[1:])
        for tensor in text
    )
    return replace(online_batch, moments=moments, text=states, pooled=pooled)


def make_trainer(
    accelerator: Accelerator, folder: Path, config: JobConfig | None = None
) -> Trainer:
    config = config or CONFIG
    paths = SageMakerPaths(folder)
    channel = paths.channel("train")
    channel.mkdir(parents=True)
    rng = np.random.default_rng(0)
    with webdataset.TarWriter(str(channel / "0.tar")) as writer:
        for number in range(64):
            content = io.BytesIO()
            Image.fromarray(rng.integers(0, 255, (SIDE, SIDE, 3), np.uint8)).save(content, "PNG")
            writer.write({"__key__": f"{number:03d}", "png": content.getvalue(), "txt": "a digit"})
    rank = DataRank(("algo-1",), 0, 0, 1)
    catalog = build_catalog(channel, None, rank, lambda value: [value], folder / "walk")
    components = build_components(
        config.model, config.stage.resolution, components=None, previous=None
    )
    events = EventLog(node=0, rank=0, stream=io.StringIO())
    return Trainer(config, components, accelerator, paths, events, catalog, rank)


def ours(trainer: Trainer, batches: list[Any]) -> Step:
    stream = cycle(batches)
    window = StepMetricsWindow(trainer.device)
    heartbeat = HeartbeatWriter(trainer.paths.base / "heartbeat-0", rank=0, local_rank=0)
    busy = trainer._create_busy_timer(heartbeat)

    def steps() -> None:
        for _ in range(STEPS):
            trainer._train_step(stream, window, heartbeat, busy)
        # Background work of the last step must not slow the next variant down.
        trainer.state.background.join()

    return steps


Inputs = tuple[DiffusionTarget, Text]


def copied(trained: nn.Module) -> tuple[nn.Module, list[nn.Parameter]]:
    module = copy.deepcopy(trained)
    return module, list(module.parameters())


def loss(model: nn.Module, inputs: Inputs) -> Tensor:
    target, text = inputs
    return diffusion_loss(model(target.noisy, target.timesteps, *text), target)


def bare(module: nn.Module, inputs: list[Inputs]) -> Step:
    """Return a loop of forward, backward, clipping and AdamW, with the same loss."""
    parameters = list(module.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=RATE, fused=True)
    stream = cycle(inputs)

    def step() -> None:
        value = loss(module, next(stream))
        value.backward()
        nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def bare_accelerate(trained: nn.Module, inputs: list[Inputs], accelerator: Accelerator) -> Step:
    module, parameters = copied(trained)
    model, optimizer = accelerator.prepare(
        module, torch.optim.AdamW(parameters, lr=RATE, fused=True)
    )
    stream = cycle(inputs)

    def step() -> None:
        with accelerator.accumulate(model):
            value = loss(model, next(stream))
            accelerator.backward(value)
            accelerator.clip_grad_norm_(parameters, CLIP)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return step


def like_diffusers(trained: nn.Module, inputs: list[Inputs], accelerator: Accelerator) -> Step:
    module, parameters = copied(trained)
    ema = EMAModel(parameters, decay=DECAY)
    optimizer = torch.optim.AdamW(parameters, lr=RATE)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    model, optimizer, schedule = accelerator.prepare(module, optimizer, schedule)
    stream = cycle(inputs)
    logged = {"loss": 0.0}

    def step() -> None:
        with accelerator.accumulate(model):
            value = loss(model, next(stream))
            logged["loss"] = accelerator.gather(value.repeat(BATCH)).mean().item()
            accelerator.backward(value)
            accelerator.clip_grad_norm_(parameters, CLIP)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        ema.step(parameters)

    return step


def repeated(step: Step) -> Step:
    def steps() -> None:
        for _ in range(STEPS):
            step()

    return steps


def compare(variants: dict[str, Step], device: torch.device) -> None:
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    cpu: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(ROUNDS + 2):
        for name, steps in variants.items():
            _synchronize(device)
            started, cpu_started = time.perf_counter(), time.process_time()
            steps()
            _synchronize(device)
            if number > 1:  # the first two warm up
                seconds[name].append(1e3 * (time.perf_counter() - started) / STEPS)
                cpu[name].append(1e3 * (time.process_time() - cpu_started) / STEPS)
    print(f"{'one step':<18}{'ms':>8}{'min':>8}{'max':>8}{'over bare':>11}{'CPU ms':>9}")
    bare = seconds["bare loop"]
    for name, values in seconds.items():
        over = statistics.median(value - base for value, base in zip(values, bare, strict=True))
        print(
            f"{name:<18}{statistics.median(values):>8.2f}{min(values):>8.2f}{max(values):>8.2f}"
            f"{over:>11.2f}{statistics.median(cpu[name]):>9.2f}"
        )
    for name in ("bare loop", "like diffusers"):
        ratios = [
            statistics.median(
                theirs / ours
                for theirs, ours in zip(measured[name], measured["sm-train"], strict=True)
            )
            for measured in (seconds, cpu)
        ]
        print(f"{name} / sm-train: {ratios[0]:.2f}×, in CPU time {ratios[1]:.2f}×")


def time_outside_passes(steps: Step, module: nn.Module) -> float:
    """Return the milliseconds per step outside of forward and backward pass."""
    inside = 0.0

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            nonlocal inside
            started = time.perf_counter()
            result = call(*arguments, **named)
            inside += time.perf_counter() - started
            return result

        return timed

    milliseconds = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "forward", counted(module.forward))
        patch.setattr(Tensor, "backward", counted(Tensor.backward))
        for _ in range(ROUNDS):
            inside, started = 0.0, time.perf_counter()
            steps()
            milliseconds.append(1e3 * (time.perf_counter() - started - inside) / STEPS)
    return statistics.median(milliseconds)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
