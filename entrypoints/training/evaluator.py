"""Evaluation during training: validation loss, and sample images of fixed prompts.

Both use the EMA weights, which a run delivers. The loss uses fixed timesteps and fixed noise on a
fixed set, so two evaluations differ by the weights alone.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from sm_train.entrypoints.base.atomic_write import write_atomic
from sm_train.entrypoints.base.sagemaker_paths import SageMakerPaths
from sm_train.entrypoints.base.signals import StopSignal
from sm_train.entrypoints.data_loading.batches import BadSampleTracker, Batch
from sm_train.entrypoints.data_loading.loader import open_loader
from sm_train.entrypoints.data_loading.shard_catalog import DataRank, ShardCatalog
from sm_train.entrypoints.distributed.object_exchange import gather
from sm_train.entrypoints.job_interface.checkpoint_layout import step_folder_name
from sm_train.entrypoints.job_interface.events import EventLog
from sm_train.entrypoints.job_interface.job_config import JobConfig
from sm_train.entrypoints.models.builder import ModelComponents
from sm_train.entrypoints.models.image_grid import draw_grid, png
from sm_train.entrypoints.models.image_sampling import SAMPLES
from sm_train.entrypoints.models.pipeline import TextToImagePipeline
from sm_train.entrypoints.monitoring.heartbeat import Phase
from sm_train.entrypoints.training.model_inputs import ModelInputs
from sm_train.entrypoints.training.train_state import TrainState
from sm_train.entrypoints.training.training_loss import TrainingLoss

LEVELS = (0.125, 0.375, 0.625, 0.875)
"""Quantiles of the timesteps' distribution at which the validation loss is measured."""

_COLUMNS, _IMAGES_AT_ONCE = 8, 8


@dataclass(frozen=True)
class ValidationSet:
    """Samples that are not trained on; every instance has a copy of all of them."""

    catalog: ShardCatalog
    rank: DataRank


class _StoppedError(Exception):
    """A stop was requested; the evaluation ends early, as SageMaker waits two minutes at most."""


class Evaluator:
    """Evaluates ``state``; all ranks call it after the same steps."""

    def __init__(
        self,
        config: JobConfig,
        components: ModelComponents,
        state: TrainState,
        accelerator: Accelerator,
        paths: SageMakerPaths,
        events: EventLog,
        validation: ValidationSet | None,
    ) -> None:
        self._config, self._components, self._state = config, components, state
        self._accelerator, self._paths, self._events = accelerator, paths, events
        self._validation = validation
        self._has_reported_skipped = False
        self._loss = TrainingLoss(config.training.objective)
        self._inputs = ModelInputs(
            components,
            accelerator.device,
            caption_dropout=0.0,
            vae_fp32=components.encodes_in_fp32(config.training),
        )

    def due(self, step: int) -> bool:
        """Return whether there is anything to evaluate after ``step``."""
        evaluation = self._config.evaluation
        anything = self._validation is not None or bool(evaluation.prompts)
        last = step == self._config.stage.max_steps
        return anything and (last or step % evaluation.every_steps == 0)

    def run(self, stop: StopSignal, enter_phase: Callable[[Phase], None]) -> None:
        """Evaluate and log the result; training pauses, and its weights are unchanged afterwards.

        Call ``enter_phase`` before every batch. A stop that any rank received ends the evaluation
        between two batches, without a result.
        """
        started = time.monotonic()
        module = self._state.module.eval()
        before_batch = partial(self._before_batch, stop, enter_phase)
        try:
            with self._state.ema_weights(), torch.no_grad(), self._accelerator.autocast():
                losses = self._losses(self._validation, before_batch) if self._validation else {}
                images = self._images(before_batch) if self._config.evaluation.prompts else None
        except _StoppedError:
            return
        finally:
            module.train()
        if self._accelerator.is_main_process:
            self._log(losses, images, time.monotonic() - started)

    def _before_batch(
        self, stop: StopSignal, enter_phase: Callable[[Phase], None], phase: Phase
    ) -> None:
        """Report the phase, and raise on all ranks if any rank received a stop."""
        enter_phase(phase)
        requested = torch.tensor(float(stop.requested), device=self._accelerator.device)
        if self._accelerator.reduce(requested, "sum").item():
            raise _StoppedError

    # ------------------------------------------------------------------ validation loss

    def _losses(
        self, validation: ValidationSet, before_batch: Callable[[Phase], None]
    ) -> dict[str, float]:
        """Return the mean loss at each level, equal for any world size up to rounding."""
        config, device = self._config, self._accelerator.device
        loader = open_loader(
            validation.catalog,
            validation.rank,
            replace(
                config.data,
                crop="center",
                aspect_buckets=False,
                max_bad_fraction=1.0,
                flip=False,
                extras=(),
                caption=() if validation.catalog.options.get("latents") else config.data.caption,
            ),
            resolution=config.stage.resolution,
            batch_size=config.stage.per_device_batch_size,
            seed=0,
            decode_workers=config.training.decode_workers,
            rng=self._components.sample_rng(0),
            tokenize=self._components.text_encoders.tokenize,
        )
        # One sum per level, and the number of samples.
        sums = torch.zeros(len(LEVELS) + 1, dtype=torch.float64, device=device)
        for batch in islice(loader, loader.epoch_size().steps):
            before_batch(Phase.EVALUATION)
            # Every sample of the set counts once, whatever the number of ranks.
            is_new = torch.from_numpy(batch.is_new).to(device)
            for index, level in enumerate(LEVELS):
                losses = self._sample_losses(batch, level).double()
                sums[index] += torch.where(is_new, losses, 0.0).sum()
            sums[-1] += is_new.sum()
        self._report_skipped(loader.bad_samples)
        *totals, count = self._accelerator.reduce(sums, "sum").tolist()
        return {str(level): total / count for level, total in zip(LEVELS, totals, strict=True)}

    def _report_skipped(self, skipped: BadSampleTracker) -> None:
        """Warn of bad samples in the first evaluation; they are the same ones in all."""
        report = skipped.report()
        if report is None or self._has_reported_skipped:
            return
        self._has_reported_skipped = True
        message, reasons = report
        self._events.warn(
            "bad-sample", f"validation set: {message}", reasons=reasons, samples=skipped.num_seen
        )

    def _sample_losses(self, batch: Batch, level: float) -> torch.Tensor:
        """Return each sample's loss (B,) at one level; the noise is the same at all levels."""
        batch = replace(batch, timestep_uniform=np.full(len(batch.origins), level))
        target, text = self._inputs.prepare(batch)
        prediction = self._state.module(target.noisy, target.timesteps, *text)
        return self._loss.per_sample(prediction, target)

    # ------------------------------------------------------------------ images

    def _images(self, before_batch: Callable[[Phase], None]) -> list[Any]:
        """Return PIL images of the prompts on rank 0, else none; the ranks divide the sampling."""
        from PIL import Image

        evaluation, world_size = self._config.evaluation, self._accelerator.num_processes
        prompts = list(enumerate(evaluation.prompts))
        assigned = prompts[self._accelerator.process_index :: world_size]
        # Forward passes of a sharded network are collectives: all ranks need equally many.
        assigned += [prompts[0]] * (math.ceil(len(prompts) / world_size) - len(assigned))
        pipeline = TextToImagePipeline(**self._components.named_components())
        pipeline.set_progress_bar_config(disable=True)
        sampled: list[tuple[int, Any]] = []
        for first in range(0, len(assigned), _IMAGES_AT_ONCE):
            before_batch(Phase.SAMPLES)
            batch = assigned[first : first + _IMAGES_AT_ONCE]
            images = pipeline(
                [prompt for _, prompt in batch],
                num_inference_steps=evaluation.num_inference_steps,
                guidance_scale=evaluation.guidance_scale,
                generator=[torch.Generator().manual_seed(number) for number, _ in batch],
            ).images
            sampled += [
                (number, np.asarray(image))
                for (number, _), image in zip(batch, images, strict=True)
            ]
        by_rank = gather(sampled) or []
        by_number = dict(image for images in by_rank for image in images)
        return [Image.fromarray(by_number[number]) for number in sorted(by_number)]

    def _log(self, losses: dict[str, float], images: list[Any] | None, seconds: float) -> None:
        step = self._state.step
        loss = sum(losses.values()) / len(losses) if losses else None
        results = [f"validation loss {loss:.4f}"] if loss is not None else []
        path = None
        if images is not None:
            path = self._write_grid(images, step)
            results += [f"{len(images)} images in {path}"] if path else []
        self._events.write(
            "eval",
            f"evaluation at step {step}: {', '.join(results)} ({seconds:.1f} s)",
            step=step,
            seconds=seconds,
            loss=loss,
            losses=losses or None,
            images=path,
        )

    def _write_grid(self, images: list[Any], step: int) -> str | None:
        """Write the grid to the checkpoint folder, which is uploaded at once, and to the output.

        Return its path relative to either; None if it cannot be written.
        """
        labels = list(self._config.evaluation.prompts)
        content = png(draw_grid(images, labels, min(_COLUMNS, len(images))))
        name = f"{step_folder_name(step)}.png"
        try:
            for folder in (self._paths.checkpoints / SAMPLES, self._paths.output_data / SAMPLES):
                folder.mkdir(parents=True, exist_ok=True)
                write_atomic(folder / name, content)
        except OSError as error:
            self._events.warn(
                "images-not-written", f"{SAMPLES}/{name}: {error}; training continues"
            )
            return None
        return f"{SAMPLES}/{name}"
