"""One optimizer step: ours against a bare loop, bare Accelerate, and a loop like diffusers' own.

The model of the demo (U-Net and text encoder, trained together) on batches that are there already,
so that what differs is what surrounds forward pass, backward pass, clipping and AdamW: noise,
average, schedule, counting, what is kept for the log. The loop like diffusers'
examples/text_to_image/train_text_to_image.py prepares all with Accelerate, gathers the loss every
step and keeps an EMAModel. Interleaved; printed are medians, spread, and the median of what each
adds to the bare loop of its round. Forward and backward pass vary more than all the rest takes:
last comes what both loops spend outside of them. Ours clips within AdamW, and spares one pass over
the gradients.

Where there is a GPU, our step then trains sd2 in bf16 at 256 and 512 pixels, from precomputed
latents and with the autoencoder and text encoder online; images/s and MFU are printed beside what
others published at 512: 127 images/s of an H100 from precomputed latents (MLPerf Training 4.0,
NVIDIA) and 48 of one online (awsome-distributed-training, 385.3 images/s of a p5). Name a preset to
do so without one.

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
    HeartbeatConfig,
    JobConfig,
    ModelConfig,
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

SETTINGS = JobConfig(
    run="bench",
    backend="auto",
    data=DataConfig(
        "png", "txt", "center", "bilinear", aspect_buckets=False, max_bad_fraction=0.01
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
        compile=False,
        seed=0,
        warmup_steps=0,
        weight_decay=0.01,
        max_grad_norm=CLIP,
        caption_dropout=0.0,
        ema_decay=DECAY,
        ema_start=0,
        max_nonfinite_steps=10,
        max_rollbacks=1,
        workers=0,
        log_every=50,
    ),
    evaluation=EvaluationConfig(10**9, (), 1, 1.0),
    checkpoint=CheckpointConfig(10**9, 1),
    heartbeat=HeartbeatConfig(30, 120, 1200, "report", 60),
    alerts=AlertsConfig(None, None, None, "warning"),
    doctor=DoctorConfig("off", 120, 1.5),
)

Step = Callable[[], Any]


def main() -> None:
    """Measure on this machine's GPU or its CPU."""
    with tempfile.TemporaryDirectory() as folder:
        accelerator = Accelerator()
        trainer = make_trainer(accelerator, Path(folder))
        batches = [next(iter(trainer.loader)) for _ in range(4)]
        inputs = [trainer.inputs.task(batch) for batch in batches]
        module = trainer.learner.module
        base, _ = copied(module)
        variants: dict[str, Step] = {
            "bare loop": repeated(bare(base, inputs)),
            "bare Accelerate": repeated(bare_accelerate(module, inputs, accelerator)),
            "like diffusers": repeated(like_diffusers(module, inputs, accelerator)),
            "sm-train": ours(trainer, batches),
        }
        weights = sum(one.numel() for one in trainer.learner.parameters)
        print(
            f"{accelerator.device}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, "
            f"{weights / 1e6:.1f} million weights, batch of {BATCH}"
        )
        compare(variants, accelerator.device)
        rest = [
            outside(steps, model)
            for steps, model in (
                (variants["sm-train"], trainer.model),
                (variants["bare loop"], base),
            )
        ]
        print(
            f"but forward and backward: sm-train {rest[0]:.2f} ms, bare loop {rest[1]:.2f}, "
            f"so the rest adds {rest[0] - rest[1]:.2f} ms"
        )
    if preset := (sys.argv[1:] or (["sd2"] if torch.cuda.is_available() else [])):
        for resolution, batch in SIZES.items():
            for online in (False, True):
                throughput(accelerator, preset[0], resolution, batch, online=online)


def throughput(
    accelerator: Accelerator, preset: str, resolution: int, batch: int, *, online: bool
) -> None:
    """Images/s and MFU of our step on batches that are there already."""
    AcceleratorState._reset_state()
    accelerator = Accelerator(mixed_precision="bf16")
    settings = replace(
        SETTINGS,
        model=replace(SETTINGS.model, preset=preset),
        stage=replace(SETTINGS.stage, resolution=resolution, per_device_batch_size=batch),
        training=replace(SETTINGS.training, precision="bf16"),
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(accelerator, Path(folder), settings)
        stream = cycle([made_up(trainer, resolution, batch, online=online)])
        interval = StepMetricsWindow(trainer.device)
        pulse = HeartbeatWriter(Path(folder) / "pulse-0", rank=0, local_rank=0)
        steps = STEPS if trainer.device.type == "cuda" else 2
        for number in range(2 * steps):
            if number == steps:
                _wait(trainer.device)
                started = time.perf_counter()
            trainer._train_step(stream, interval, pulse)
        _wait(trainer.device)
    images = steps * batch / (time.perf_counter() - started)
    meter = mfu_meter(settings, trainer.device)
    mfu = f", MFU {meter.mfu(images, 1):.1%}" if meter else ""
    published = PUBLISHED[online] if (preset, resolution) == ("sd2", 512) else None
    beside = f", {images / published:.2f} × {published:.0f} published" if published else ""
    kind = "autoencoder online" if online else "precomputed latents"
    print(f"{preset}, {resolution} px, batch {batch}, {kind}: {images:.1f} images/s{mfu}{beside}")


def made_up(trainer: Trainer, resolution: int, batch: int, *, online: bool) -> Batch:
    """A batch of noise, with images and token ids or with what is precomputed of them."""
    parts = trainer.parts
    text = parts.text_encoders.encode(
        [ids.to(trainer.device) for ids in parts.text_encoders.tokenize(["a word"])]
    )
    side = resolution // parts.vae_scale_factor
    moments = torch.zeros(batch, 2 * parts.network.config.in_channels, side, side).half()
    whole = Batch(
        torch.randint(0, 255, (batch, resolution, resolution, 3), dtype=torch.uint8),
        ["a word"] * batch,
        trainer.loader.position,
        (),
        0,
        tuple((0, n) for n in range(batch)),
        np.linspace(0.01, 0.99, batch),
        np.ones(batch),
        torch.randn(parts.sample_rng(0).shape(batch, resolution, resolution)),
        tokens=tuple(ids.numpy() for ids in parts.text_encoders.tokenize(["a word"] * batch)),
    )
    if online:
        return whole
    states, pooled = (
        None if one is None else one.detach().half().cpu().expand(batch, *one.shape[1:])
        for one in text
    )
    return replace(whole, moments=moments, text=states, pooled=pooled)


def make_trainer(
    accelerator: Accelerator, folder: Path, settings: JobConfig | None = None
) -> Trainer:
    settings = settings or SETTINGS
    directories = SageMakerPaths(folder)
    channel = directories.channel("train")
    channel.mkdir(parents=True)
    rng = np.random.default_rng(0)
    with webdataset.TarWriter(str(channel / "0.tar")) as writer:
        for number in range(64):
            content = io.BytesIO()
            Image.fromarray(rng.integers(0, 255, (SIDE, SIDE, 3), np.uint8)).save(content, "PNG")
            writer.write({"__key__": f"{number:03d}", "png": content.getvalue(), "txt": "a digit"})
    seat = DataRank(("algo-1",), 0, 0, 1)
    catalogue = build_catalog(channel, None, seat, lambda said: [said], folder / "walk")
    parts = build_components(
        settings.model, settings.stage.resolution, components=None, previous=None
    )
    events = EventLog(node=0, rank=0, stream=io.StringIO())
    return Trainer(settings, parts, accelerator, directories, events, catalogue, seat)


def ours(trainer: Trainer, batches: list[Any]) -> Step:
    stream = cycle(batches)
    interval = StepMetricsWindow(trainer.device)
    pulse = HeartbeatWriter(trainer.directories.base / "pulse-0", rank=0, local_rank=0)

    def steps() -> None:
        for _ in range(STEPS):
            trainer._train_step(stream, interval, pulse)
        # What went on beside the last one is no other loop's business.
        trainer.learner.beside.join()

    return steps


Input = tuple[DiffusionTarget, Text]


def copied(trained: nn.Module) -> tuple[nn.Module, list[nn.Parameter]]:
    module = copy.deepcopy(trained)
    return module, list(module.parameters())


def loss(model: nn.Module, one: Input) -> Tensor:
    task, text = one
    return diffusion_loss(model(task.noisy, task.timesteps, *text), task)


def bare(module: nn.Module, inputs: list[Input]) -> Step:
    """Forward, backward, clip, AdamW, with the same loss."""
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


def bare_accelerate(trained: nn.Module, inputs: list[Input], accelerator: Accelerator) -> Step:
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


def like_diffusers(trained: nn.Module, inputs: list[Input], accelerator: Accelerator) -> Step:
    module, parameters = copied(trained)
    average = EMAModel(parameters, decay=DECAY)
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
        average.step(parameters)

    return step


def repeated(step: Step) -> Step:
    def steps() -> None:
        for _ in range(STEPS):
            step()

    return steps


def compare(variants: dict[str, Step], device: torch.device) -> None:
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(ROUNDS + 2):
        for name, steps in variants.items():
            _wait(device)
            started = time.perf_counter()
            steps()
            _wait(device)
            if number > 1:  # the first two warm
                seconds[name].append(1e3 * (time.perf_counter() - started) / STEPS)
    print(f"{'one step':<18}{'ms':>8}{'least':>8}{'most':>8}{'over bare':>11}")
    bare = seconds["bare loop"]
    for name, values in seconds.items():
        over = statistics.median(one - base for one, base in zip(values, bare, strict=True))
        print(
            f"{name:<18}{statistics.median(values):>8.2f}{min(values):>8.2f}{max(values):>8.2f}"
            f"{over:>11.2f}"
        )
    theirs, own = (statistics.median(seconds[name]) for name in ("like diffusers", "sm-train"))
    print(f"like diffusers / sm-train: {theirs / own:.2f}×")


def outside(steps: Step, module: nn.Module) -> float:
    """Milliseconds a step that are neither in forward nor in backward."""
    inside = 0.0

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            nonlocal inside
            started = time.perf_counter()
            result = call(*arguments, **named)
            inside += time.perf_counter() - started
            return result

        return timed

    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "forward", counted(module.forward))
        patch.setattr(Tensor, "backward", counted(Tensor.backward))
        for _ in range(ROUNDS):
            inside, started = 0.0, time.perf_counter()
            steps()
            found.append(1e3 * (time.perf_counter() - started - inside) / STEPS)
    return statistics.median(found)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
