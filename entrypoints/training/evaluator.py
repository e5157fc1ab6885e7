"""How good the model is, while it trains: held-out loss, and images of some prompts.

Both by the averaged weights, which are what a run delivers. The loss is at fixed timesteps and with
fixed noise on a fixed set, so that two evaluations differ by the weights alone.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from sm_train.entrypoints.common.atomic_write import write_atomic
from sm_train.entrypoints.common.checkpoint_layout import step_folder_name
from sm_train.entrypoints.common.events import EventLog
from sm_train.entrypoints.common.job_config import JobConfig
from sm_train.entrypoints.common.sagemaker_paths import SageMakerPaths
from sm_train.entrypoints.common.signals import StopSignal
from sm_train.entrypoints.data.batches import Batch
from sm_train.entrypoints.data.loader import Loader
from sm_train.entrypoints.data.shard_catalog import DataRank, ShardCatalog
from sm_train.entrypoints.models.builder import ModelComponents
from sm_train.entrypoints.models.image_grid import draw_grid, png
from sm_train.entrypoints.models.objectives import per_sample_loss
from sm_train.entrypoints.models.pipeline import TextToImagePipeline
from sm_train.entrypoints.monitoring.heartbeat import Phase
from sm_train.entrypoints.training.model_inputs import ModelInputs
from sm_train.entrypoints.training.train_state import TrainState

LEVELS = (0.125, 0.375, 0.625, 0.875)
"""Where along the timesteps' distribution the held-out loss is taken."""

SAMPLES = "samples"
"""The folder of the grids, below the checkpoints' and in the job's output."""

_COLUMNS, _AT_ONCE = 8, 8


@dataclass(frozen=True)
class ValidationSet:
    """Samples that are not trained on; every instance sees all of them."""

    catalogue: ShardCatalog
    seat: DataRank


class _StoppedError(Exception):
    """Somebody asked the job to stop: SageMaker waits for two minutes only."""


class Evaluator:
    """Evaluates what ``learner`` has learned; called by all processes after the same steps."""

    def __init__(
        self,
        settings: JobConfig,
        parts: ModelComponents,
        learner: TrainState,
        accelerator: Accelerator,
        directories: SageMakerPaths,
        events: EventLog,
        held_out: ValidationSet | None,
    ) -> None:
        self._settings, self._parts, self._learner = settings, parts, learner
        self._accelerator, self._directories, self._events = accelerator, directories, events
        self._held_out = held_out
        self._inputs = ModelInputs(parts, accelerator.device, dropout=0.0)

    def due(self, step: int) -> bool:
        evaluation = self._settings.evaluation
        something = self._held_out is not None or bool(evaluation.prompts)
        last = step == self._settings.stage.max_steps
        return something and (last or step % evaluation.every_steps == 0)

    def run(self, stop: StopSignal, alive: Callable[[Phase], None]) -> None:
        """Training stands still; the weights are afterwards what they were before.

        ``alive`` is called before every batch, with what comes.

        A stop that any process was asked for ends it between two batches, without a result.
        """
        started = time.monotonic()
        module = self._learner.module.eval()
        heed = partial(self._heed, stop, alive)
        try:
            with self._learner.ema_weights(), torch.no_grad(), self._accelerator.autocast():
                losses = {} if self._held_out is None else self._losses(self._held_out, heed)
                images = self._images(heed) if self._settings.evaluation.prompts else None
        except _StoppedError:
            return
        finally:
            module.train()
        if self._accelerator.is_main_process:
            self._tell(losses, images, time.monotonic() - started)

    def _heed(self, stop: StopSignal, alive: Callable[[Phase], None], section: Phase) -> None:
        alive(section)
        asked = torch.tensor(float(stop.requested), device=self._accelerator.device)
        if self._accelerator.reduce(asked, "sum").item():
            raise _StoppedError

    # ------------------------------------------------------------------ held-out loss

    def _losses(self, held_out: ValidationSet, heed: Callable[[Phase], None]) -> dict[str, float]:
        """The mean loss at each level; the same, but for rounding, for any number of processes."""
        settings, device = self._settings, self._accelerator.device
        loader = Loader(
            held_out.catalogue,
            held_out.seat,
            replace(settings.data, crop="center", aspect_buckets=False, max_bad_fraction=1.0),
            resolution=settings.stage.resolution,
            batch_size=settings.stage.per_device_batch_size,
            seed=0,
            decode_workers=0,
            rng=self._parts.draws(0),
            tokenize=self._parts.text.tokenize,
        )
        sums = torch.zeros(len(LEVELS) + 1, dtype=torch.float64, device=device)
        for batch, _ in zip(loader, range(loader.epoch_size().steps), strict=False):
            heed(Phase.EVALUATION)
            # What is repeated to make processes equal stands at a batch's end.
            fresh = len(batch.origins) - batch.num_repeated
            for number, level in enumerate(LEVELS):
                sums[number] += self._errors(batch, level)[:fresh].double().sum()
            sums[-1] += fresh
        *totals, count = self._accelerator.reduce(sums, "sum").tolist()
        return {str(level): one / count for level, one in zip(LEVELS, totals, strict=True)}

    def _errors(self, batch: Batch, level: float) -> torch.Tensor:
        """Of each sample, at one level; its noise is the same at all of them."""
        batch = replace(batch, timestep_uniform=np.full(len(batch.origins), level))
        task, text = self._inputs.prepare(batch)
        return per_sample_loss(self._learner.module(task.noisy, task.timesteps, *text), task)

    # ------------------------------------------------------------------ images

    def _images(self, heed: Callable[[Phase], None]) -> list[Any]:
        """PIL images of the prompts, on the first process; each process draws some of them."""
        from PIL import Image

        evaluation, world = self._settings.evaluation, self._accelerator.num_processes
        prompts = list(enumerate(evaluation.prompts))
        own = prompts[self._accelerator.process_index :: world]
        # Where weights are split, all processes go through the network equally often.
        own += [prompts[0]] * (math.ceil(len(prompts) / world) - len(own))
        pipeline = TextToImagePipeline(**self._parts.folders())
        pipeline.set_progress_bar_config(disable=True)
        drawn: list[tuple[int, Any]] = []
        for first in range(0, len(own), _AT_ONCE):
            heed(Phase.SAMPLES)
            some = own[first : first + _AT_ONCE]
            images = pipeline(
                [prompt for _, prompt in some],
                num_inference_steps=evaluation.num_inference_steps,
                guidance_scale=evaluation.guidance_scale,
                generator=[torch.Generator().manual_seed(number) for number, _ in some],
            ).images
            drawn += [
                (number, np.asarray(image)) for (number, _), image in zip(some, images, strict=True)
            ]
        everyones = dict(gather_object(drawn))
        return [Image.fromarray(everyones[number]) for number in range(len(prompts))]

    def _tell(self, losses: dict[str, float], images: list[Any] | None, seconds: float) -> None:
        step = self._learner.step
        loss = sum(losses.values()) / len(losses) if losses else None
        said = [f"held-out loss {loss:.4f}"] if loss is not None else []
        path = None
        if images is not None:
            path = self._write(images, step)
            said += [f"{len(images)} images in {path}"] if path else []
        self._events.write(
            "eval",
            f"evaluation at step {step}: {', '.join(said)} ({seconds:.1f} s)",
            step=step,
            seconds=seconds,
            loss=loss,
            losses=losses or None,
            images=path,
        )

    def _write(self, images: list[Any], step: int) -> str | None:
        """The grid, where it is copied to S3 at once, and in the job's output."""
        labels = list(self._settings.evaluation.prompts)
        content = png(draw_grid(images, labels, min(_COLUMNS, len(images))))
        name = f"{step_folder_name(step)}.png"
        folders = [self._directories.checkpoints / SAMPLES, self._directories.output_data / SAMPLES]
        try:
            for folder in folders:
                folder.mkdir(parents=True, exist_ok=True)
                write_atomic(folder / name, content)
        except OSError as error:
            self._events.warn("images-not-written", f"{SAMPLES}/{name}: {error}; training goes on")
            return None
        return f"{SAMPLES}/{name}"
