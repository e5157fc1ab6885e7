"""Images from a final model, a checkpoint, or the newest of several."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from sm_train.entrypoints.checkpointing.manifest import (
    EMA,
    MODEL,
    CheckpointError,
    latest_complete,
    read_marker,
    shard_files,
)
from sm_train.entrypoints.checkpointing.sharded_tensors import ShardedTensorError, load_full
from sm_train.entrypoints.common.checkpoint_layout import FINAL_MODEL, parse_step_folder
from sm_train.entrypoints.common.rng import hash64
from sm_train.entrypoints.models.export import is_frame, load_frame, load_model
from sm_train.entrypoints.models.network import network_folder

FRAME = "components"
"""The folder beside checkpoints that holds what training does not change."""

_AT_ONCE = 16
"""Images drawn together: bounds the memory, whatever the number of prompts."""


@dataclass(frozen=True)
class SamplingOptions:
    """``steps`` of the sampler, guidance (1 is none), and what the noise belongs to."""

    num_inference_steps: int
    guidance_scale: float
    seed: int


@dataclass(frozen=True)
class ModelSource:
    """What is drawn from: a model folder, or a checkpoint's weights in a model's frame."""

    model: Path
    checkpoint: Path | None = None


def find_source(folder: Path) -> ModelSource:
    """Tell what ``folder`` is: a model, one checkpoint, or a run's checkpoints.

    Raises:
        CheckpointError: it is none of them, or the checkpoint is incomplete.
    """
    if (folder / "model_index.json").is_file():
        return ModelSource(folder)
    if parse_step_folder(folder.name) is not None:
        return _from_checkpoint(read_marker(folder).folder)
    passed_over: list[str] = []
    found = latest_complete(folder, lambda _, reason: passed_over.append(reason))
    if found is not None:
        return _from_checkpoint(found.folder)
    if (folder / FINAL_MODEL / "model_index.json").is_file():
        return ModelSource(folder / FINAL_MODEL)
    reason = passed_over[0] if passed_over else f"{folder}: holds no model and no checkpoint"
    raise CheckpointError(reason)


def _from_checkpoint(folder: Path) -> ModelSource:
    frame = folder.parent / FRAME
    if not is_frame(frame):
        raise CheckpointError(f"{frame}: is missing; it lies beside the checkpoints of a run")
    return ModelSource(frame, folder)


def load(source: ModelSource) -> Any:
    """The pipeline of ``source``, on the GPU where there is one.

    Raises:
        CheckpointError: the model cannot be read, or the weights are of another one.
    """
    network = network_folder(source.model) if source.checkpoint is None else source.model
    for part, folder in [
        ("network", network),
        *((part, source.model / part) for part in ("scheduler", "text_encoder", "tokenizer")),
    ]:
        if folder is None or not any(folder.glob("*.json")):
            raise CheckpointError(f"{source.model}: has no {part}; it is no model of sm-train")
    try:
        pipeline = (
            load_model(source.model)
            if source.checkpoint is None
            else _with_weights(source.model, source.checkpoint)
        )
    except CheckpointError:
        raise
    except Exception as error:
        # Diffusers, transformers and safetensors have no base of their errors in common.
        reason = str(error).partition("\n")[0]
        raise CheckpointError(f"{source.model}: cannot be read: {reason}") from error
    pipeline.set_progress_bar_config(disable=True)
    return pipeline.to("cuda" if torch.cuda.is_available() else "cpu")


def _with_weights(frame: Path, checkpoint: Path) -> Any:
    """The averaged ones, if the run kept an average; buffers are not averaged."""
    files = shard_files(checkpoint)
    try:
        weights = load_full(files, MODEL) | load_full(files, EMA)
    except ShardedTensorError as error:
        raise CheckpointError(f"{checkpoint}: {error}") from None
    try:
        return load_frame(frame, weights)
    except RuntimeError:
        raise CheckpointError(f"{checkpoint}: is of another model than {frame}") from None


def generate(pipeline: Any, prompts: Sequence[str], how: SamplingOptions) -> Iterator[list[Any]]:
    """One PIL image for each prompt, some at a time.

    A prompt's noise belongs to the seed and its place, not to what is drawn beside it.
    """
    for start in range(0, len(prompts), _AT_ONCE):
        some = list(prompts[start : start + _AT_ONCE])
        seeds = (int(hash64(how.seed % 2**64, start + number)) for number in range(len(some)))
        yield pipeline(
            some,
            num_inference_steps=how.num_inference_steps,
            guidance_scale=how.guidance_scale,
            generator=[torch.Generator().manual_seed(seed - 2**63) for seed in seeds],
        ).images
