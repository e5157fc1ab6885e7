"""One optimizer step: ours against a bare loop, bare Accelerate, and a loop like diffusers' own.

The model is the demo's (U-Net and text encoder, trained together), on batches that are in memory.
The loops differ in what surrounds forward pass, backward pass, clipping and AdamW: noise, EMA,
schedule, metrics. The loop like diffusers' examples/text_to_image/train_text_to_image.py prepares
everything with Accelerate, gathers the loss every step and keeps an EMAModel. The variants are
interleaved; the output is medians, spread, the median of each one's overhead over the bare loop of
its round, and CPU time, which other programs on the machine disturb less. Forward and backward pass
vary by more than the overhead, so the last line compares the time outside of them. Ours clips
within AdamW, which saves one pass over the gradients.

gpu.py measures the step on a GPU. The last table is that of step_options.py: what a CPU cannot show
is counted.

    python benchmarks/step.py
"""

from __future__ import annotations

import copy
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import step_options
import torch
from accelerate import Accelerator
from diffusers.training_utils import EMAModel
from sm_train.entrypoints.models.objectives import DiffusionTarget
from sm_train.entrypoints.models.objectives import loss as diffusion_loss
from sm_train.entrypoints.models.pipeline import Text
from sm_train.entrypoints.monitoring.heartbeat import HeartbeatWriter
from sm_train.entrypoints.training.step_metrics import StepMetricsWindow
from sm_train.entrypoints.training.trainer import Trainer
from torch import Tensor, nn
from training_setup import BATCH, CLIP, DECAY, RATE, make_trainer

ROUNDS, STEPS = 30, 8

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
    step_options.main()


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
        value.backward()  # type: ignore[no-untyped-call]
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
