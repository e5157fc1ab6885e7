"""Sample images from a final model, a checkpoint, or the latest of several checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    pass


from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from sm_train.entrypoints.base.rng import hash64
from sm_train.entrypoints.checkpoints.checkpoint_files import (
    EMA,
    MODEL,
    CheckpointError,
    latest_complete,
    read_marker,
    shard_files,
)
from sm_train.entrypoints.checkpoints.sharded_tensors import ShardedTensorError, load_full
from sm_train.entrypoints.job_interface.checkpoint_layout import FINAL_MODEL, parse_step_folder
from sm_train.entrypoints.models.lora import adapter_file, read_adapter
from sm_train.entrypoints.models.model_folder import require_loadable
from sm_train.entrypoints.models.model_folders import (
    is_components_folder,
    load_model,
    load_with_weights,
)
from sm_train.entrypoints.models.trained_network import network_folder
from torch import Tensor

COMPONENTS_FOLDER = "components"
"""The folder next to checkpoints that holds the components that training does not change."""

SAMPLES = "samples"
"""Folder next to checkpoints with the image grids of evaluations, named after their steps."""

_BATCH_SIZE = 16
"""Images that are sampled together. Bounds the memory for any number of prompts."""


@dataclass(frozen=True)
class SamplingOptions:
    """Options of sampling. A ``guidance_scale`` of 1 is no guidance; ``seed`` sets the noise."""

    num_inference_steps: int
    guidance_scale: float
    seed: int


@dataclass(frozen=True)
class ModelSource:
    """A model folder, or a components folder with the weights of ``checkpoint`` or ``adapter``.

    ``adapter`` is the folder of an exported adapter.
    """

    model: Path
    checkpoint: Path | None = None
    adapter: Path | None = None

    @property
    def is_model_folder(self) -> bool:
        return self.checkpoint is None and self.adapter is None

    @property
    def weights(self) -> Path:
        """The folder that was trained: the most specific one."""
        return self.checkpoint or self.adapter or self.model


def find_source(folder: Path) -> ModelSource:
    """Find the model in ``folder``: a model, one checkpoint, or a run's checkpoints.

    Raises:
        CheckpointError: there is none, or the checkpoint is incomplete.
    """
    if (folder / "model_index.json").is_file():
        return ModelSource(folder)
    if adapter_file(folder) is not None:
        return _from_adapter(folder)
    if parse_step_folder(folder.name) is not None:
        return _from_checkpoint(read_marker(folder).folder)
    skip_reasons: list[str] = []
    checkpoint = latest_complete(folder, lambda _, reason: skip_reasons.append(reason))
    if checkpoint is not None:
        return _from_checkpoint(checkpoint.folder)
    if (folder / FINAL_MODEL / "model_index.json").is_file():
        return ModelSource(folder / FINAL_MODEL)
    if adapter_file(folder / FINAL_MODEL) is not None:
        return _from_adapter(folder / FINAL_MODEL)
    reason = skip_reasons[0] if skip_reasons else f"{folder}: holds no model and no checkpoint"
    raise CheckpointError(reason)


def latest_grid(checkpoints: Path, step: int) -> Path | None:
    """Return the newest image grid of an evaluation up to ``step``; None if there is none."""
    names = {path: parse_step_folder(path.stem) for path in (checkpoints / SAMPLES).glob("*.png")}
    steps = {path: number for path, number in names.items() if number is not None}
    return max((path for path in steps if steps[path] <= step), key=steps.__getitem__, default=None)


def _from_checkpoint(folder: Path) -> ModelSource:
    components = folder.parent / COMPONENTS_FOLDER
    if not is_components_folder(components):
        raise CheckpointError(f"{components}: is missing; copy it from the run's checkpoints")
    return ModelSource(components, folder)


def _from_adapter(folder: Path) -> ModelSource:
    components = folder.parent / COMPONENTS_FOLDER
    if not is_components_folder(components):
        raise CheckpointError(
            f"{folder}: holds an adapter without the model that it extends; give the run's "
            "checkpoints, or open it with diffusers (README.md)"
        )
    return ModelSource(components, adapter=folder)


def load_pipeline(source: ModelSource) -> Any:
    """Load the pipeline of ``source``, onto the GPU if there is one.

    Raises:
        CheckpointError: the model cannot be read, or the weights belong to another model.
    """
    require_loadable(source.model)
    network = network_folder(source.model) if source.is_model_folder else source.model
    for component, folder in [
        ("network", network),
        *((name, source.model / name) for name in ("scheduler", "text_encoder", "tokenizer")),
    ]:
        if folder is None or not any(folder.glob("*.json")):
            raise CheckpointError(
                f"{source.model}: has no {component}; give a model that sm-train saved"
            )
    try:
        pipeline = (
            load_model(source.model)
            if source.is_model_folder
            else _load_trained(source.model, source.weights, _trained_weights(source))
        )
        # Weights of another network leave some of the model's own without memory.
        pipeline.to("cuda" if torch.cuda.is_available() else "cpu")
    except CheckpointError:
        raise
    except Exception as error:
        # The errors of diffusers, transformers and safetensors have no common base class.
        reason = str(error).partition("\n")[0]
        raise CheckpointError(f"{source.model}: cannot be read: {reason}") from error
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _trained_weights(source: ModelSource) -> dict[str, Tensor]:
    """Return EMA weights if the run kept them; buffers have no EMA and come from the model."""
    if source.adapter is not None:
        _, tensors = read_adapter(source.adapter)
        return dict(tensors)
    assert source.checkpoint is not None
    files = shard_files(source.checkpoint)
    try:
        return load_full(files, MODEL) | load_full(files, EMA)
    except ShardedTensorError as error:
        raise CheckpointError(f"{source.checkpoint}: {error}") from None


def _load_trained(components: Path, origin: Path, weights: dict[str, Tensor]) -> Any:
    try:
        return load_with_weights(components, weights)
    except RuntimeError:
        raise CheckpointError(f"{origin}: belongs to another model than {components}") from None


def generate(
    pipeline: Any, prompts: Sequence[str], options: SamplingOptions
) -> Iterator[list[Any]]:
    """Sample one PIL image for each prompt and yield them in batches.

    A prompt's noise depends on the seed and its index alone, not on the other prompts of the batch.
    """
    for start in range(0, len(prompts), _BATCH_SIZE):
        batch = list(prompts[start : start + _BATCH_SIZE])
        seeds = (int(hash64(options.seed % 2**64, start + index)) for index in range(len(batch)))
        yield pipeline(
            batch,
            num_inference_steps=options.num_inference_steps,
            guidance_scale=options.guidance_scale,
            # PyTorch takes signed seeds.
            generator=[torch.Generator().manual_seed(seed - 2**63) for seed in seeds],
        ).images
