"""Small models with random weights, saved as a job saves them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from sm_train.entrypoints.checkpoints.checkpoint_files import EMA, MODEL, write_file, write_marker
from sm_train.entrypoints.checkpoints.sharded_tensors import ShardSpec, save_shards
from sm_train.entrypoints.job_interface.checkpoint_layout import shard_file_name
from sm_train.entrypoints.job_interface.job_config import ModelConfig
from sm_train.entrypoints.models.builder import ModelComponents, build_components
from sm_train.entrypoints.models.model_card import TrainingRecord
from sm_train.entrypoints.models.model_folders import TrainedWeights, save_components, save_model
from sm_train.entrypoints.models.weight_files import TensorSpec

RAW_OFFSET = 0.25
"""Difference of the raw weights from the averaged ones."""


def record(**changes: Any) -> TrainingRecord:
    """Return what a model card says about a run."""
    values: dict[str, Any] = {
        "run": "tiny",
        "stage": "64px",
        "preset": "tiny-sdxl",
        "prediction_type": "epsilon",
        "resolution": 64,
        "license": "apache-2.0",
        "data_digest": "d1",
        "data_digest_covers": "content",
        "bundle": "b1",
        "commit": None,
        "prompts": ("a grey of 3",),
        "base_model": None,
    }
    return TrainingRecord(**(values | changes))


def build(
    preset: str, resolution: int = 64, components: Path | None = None, **model: Any
) -> ModelComponents:
    """Build a preset with the same random weights each time; ``components`` are loaded."""
    torch.manual_seed(0)
    options = {
        "prediction_type": None,
        "zero_terminal_snr": False,
        "min_snr_gamma": None,
        "timestep_shift": None,
    }
    parts = build_components(
        ModelConfig(preset, **(options | model)),
        resolution,
        components=components,
        previous=None,
    )
    parts.network_init.materialize(torch.device("cpu"), 0)
    if components is None:
        _perturb(parts.network)
    return parts


def _perturb(network: torch.nn.Module) -> None:
    """Set the layers that start as zero to other values, or every image would be the noise."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in network.parameters():
            weight += 0.05 * torch.randn(weight.shape, generator=generator)


def save(parts: ModelComponents, folder: Path, source: Path | None = None) -> Path:
    """Save a final model below ``folder`` as a job does; return its folder."""
    save_components(parts, source, record(), folder / "components")
    save_model(folder / "components", trained_weights(parts), folder / "model")
    return folder / "model"


def trained_weights(parts: ModelComponents) -> TrainedWeights:
    """Return the weights of a job's end."""
    tensors = parts.trained_module().state_dict()
    layout = {name: TensorSpec.of(tensor) for name, tensor in tensors.items()}
    return TrainedWeights(tensors.items(), layout, 3, "ema")


def write_checkpoint(parts: ModelComponents, checkpoints: Path, *, ema: bool = True) -> Path:
    """Write a checkpoint of two FSDP ranks, each with half of the rows."""
    save_components(parts, None, record(), checkpoints / "components")
    folder = checkpoints / "step-00000003"
    folder.mkdir()
    module = parts.trained_module()
    trained = {name for name, _ in module.named_parameters()}
    files = []
    for rank in range(2):
        shards = {}
        for name, tensor in module.state_dict().items():
            rows = -(-tensor.shape[0] // 2) if tensor.dim() else 0
            start = (rank * rows, *(0,) * (tensor.dim() - 1)) if tensor.dim() else ()
            if (tensor.dim() == 0 and rank) or (tensor.dim() and rank * rows >= tensor.shape[0]):
                continue
            part = tensor[rank * rows : (rank + 1) * rows].clone() if tensor.dim() else tensor
            if ema and name in trained:
                shards[ShardSpec(f"{EMA}{name}", start)] = part
                part = part + RAW_OFFSET
            shards[ShardSpec(f"{MODEL}{name}", start)] = part
        save = lambda path, shards=shards: save_shards(path, shards)  # noqa: E731
        files.append(write_file(folder, shard_file_name(rank), save))
    write_marker(folder, 3, 2, "fingerprint", files)
    return folder
