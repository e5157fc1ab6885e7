"""One optimizer step: ours against a bare loop, bare Accelerate, and a loop like diffusers' own.

The model of the demo (U-Net and text encoder, trained together) on batches that are there already,
so that what differs is what surrounds forward pass, backward pass, clipping and AdamW: noise,
average, schedule, counting, what is kept for the log. The loop like diffusers'
examples/text_to_image/train_text_to_image.py prepares all with Accelerate, gathers the loss every
step and keeps an EMAModel. Interleaved; printed are medians, spread, and what each adds to the
bare loop. On a GPU where there is one.

    python benchmarks/step.py
"""

from __future__ import annotations

import copy
import io
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
import webdataset
from accelerate import Accelerator
from diffusers.training_utils import EMAModel
from PIL import Image
from sm_train.entrypoints.catalogue import Seat, survey
from sm_train.entrypoints.directories import Directories
from sm_train.entrypoints.events import Events
from sm_train.entrypoints.interval import Interval
from sm_train.entrypoints.models import build
from sm_train.entrypoints.objective import Task, error
from sm_train.entrypoints.pipeline import Text
from sm_train.entrypoints.settings import (
    Checkpoint,
    Data,
    Evaluation,
    Heartbeat,
    Model,
    Settings,
    Stage,
    Training,
)
from sm_train.entrypoints.trainer import Trainer
from torch import Tensor, nn

ROUNDS, STEPS, BATCH, SIDE = 15, 20, 8, 16
RATE, CLIP, DECAY = 1e-4, 1.0, 0.999

SETTINGS = Settings(
    run="bench",
    collective="auto",
    data=Data("png", "txt", "center", "bilinear", aspect_buckets=False, max_bad_share=0.01),
    model=Model("digits", None, zero_terminal_snr=False, min_snr_gamma=None, timestep_shift=None),
    stage=Stage(
        "bench",
        SIDE,
        BATCH,
        1,
        10**9,
        RATE,
        "none",
        activation_checkpointing=False,
        start="ema",
        optimizer="fresh",
    ),
    training=Training(
        "fp32",
        compile=False,
        seed=0,
        warmup_iterations=0,
        weight_decay=0.01,
        gradient_clip=CLIP,
        caption_dropout=0.0,
        ema_decay=DECAY,
        ema_start=0,
        max_skipped_steps=10,
        max_rollbacks=1,
        workers=0,
        log_every=50,
    ),
    evaluation=Evaluation(10**9, (), 1, 1.0),
    checkpoint=Checkpoint(10**9, 1),
    heartbeat=Heartbeat(30, 900),
)

Step = Callable[[], Any]


def main() -> None:
    """Measure on this machine's GPU or its CPU."""
    with tempfile.TemporaryDirectory() as folder:
        accelerator = Accelerator()
        trainer = make_trainer(accelerator, Path(folder))
        batches = [next(iter(trainer.loader)) for _ in range(4)]
        inputs = [trainer._task(batch) for batch in batches]
        module = trainer.learner.module
        variants: dict[str, Step] = {
            "bare loop": bare(module, inputs),
            "bare Accelerate": bare_accelerate(module, inputs, accelerator),
            "like diffusers": like_diffusers(module, inputs, accelerator),
            "sm-train": ours(trainer, batches),
        }
        weights = sum(one.numel() for one in trainer.learner.parameters)
        print(f"{accelerator.device}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, "
              f"{weights / 1e6:.1f} million weights, batch of {BATCH}")  # fmt: skip
        compare(variants, accelerator.device)


def make_trainer(accelerator: Accelerator, folder: Path) -> Trainer:
    directories = Directories(folder)
    channel = directories.channel("train")
    channel.mkdir(parents=True)
    rng = np.random.default_rng(0)
    with webdataset.TarWriter(str(channel / "0.tar")) as writer:
        for number in range(64):
            content = io.BytesIO()
            Image.fromarray(rng.integers(0, 255, (SIDE, SIDE, 3), np.uint8)).save(content, "PNG")
            writer.write({"__key__": f"{number:03d}", "png": content.getvalue(), "txt": "a digit"})
    seat = Seat(("algo-1",), 0, 0, 1)
    catalogue = survey(channel, None, seat, lambda said: [said], folder / "walk")
    parts = build(SETTINGS.model, SIDE, components=None, previous=None)
    events = Events(node=0, rank=0, stream=io.StringIO())
    return Trainer(SETTINGS, parts, accelerator, directories, events, catalogue, seat)


def ours(trainer: Trainer, batches: list[Any]) -> Step:
    stream = cycle(batches)
    interval = Interval(trainer.device)
    return lambda: trainer._train_step(stream, interval)


Input = tuple[Task, Text]


def copied(trained: nn.Module) -> tuple[nn.Module, list[nn.Parameter]]:
    module = copy.deepcopy(trained)
    return module, list(module.parameters())


def loss(model: nn.Module, one: Input) -> Tensor:
    task, text = one
    return error(model(task.noisy, task.timesteps, *text), task)


def bare(trained: nn.Module, inputs: list[Input]) -> Step:
    """Forward, backward, clip, AdamW, with the same loss."""
    module, parameters = copied(trained)
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


def compare(variants: dict[str, Step], device: torch.device) -> None:
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(ROUNDS + 2):
        for name, step in variants.items():
            _wait(device)
            started = time.perf_counter()
            for _ in range(STEPS):
                step()
            _wait(device)
            if number > 1:  # the first two warm
                seconds[name].append(1e3 * (time.perf_counter() - started) / STEPS)
    median = {name: statistics.median(values) for name, values in seconds.items()}
    print(f"{'one step':<18}{'ms':>8}{'least':>8}{'most':>8}{'over bare':>11}")
    for name, values in seconds.items():
        over = median[name] - median["bare loop"]
        print(f"{name:<18}{median[name]:>8.2f}{min(values):>8.2f}{max(values):>8.2f}{over:>11.2f}")
    print(f"like diffusers / sm-train: {median['like diffusers'] / median['sm-train']:.2f}×")


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
