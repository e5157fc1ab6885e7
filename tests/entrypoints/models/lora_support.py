"""Helpers of the tests of lora, which other tests use as well."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from sm_train.entrypoints.checkpoints.checkpoint_files import (
    MODEL,
    write_file,
    write_marker,
)
from sm_train.entrypoints.checkpoints.sharded_tensors import ShardSpec, save_shards
from sm_train.entrypoints.job_interface.checkpoint_layout import shard_file_name
from sm_train.entrypoints.job_interface.job_config import LoraConfig
from sm_train.entrypoints.models.builder import ModelComponents
from sm_train.entrypoints.models.model_folders import TrainedWeights, save_components, save_model
from sm_train.entrypoints.models.weight_files import TensorSpec
from sm_train.entrypoints.training.state_dict import model_tensors

from tests.support.models import build, record

LORA = LoraConfig(rank=4, alpha=6.0, targets=None, dropout=0.0)


def train(preset: str, base: Path, lora: LoraConfig = LORA, **model: Any) -> ModelComponents:
    """Return the model in ``base`` with an adapter whose weights are not zero."""
    parts = build(preset, components=base, lora=lora, **model)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in parts.network.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return parts


def weights(parts: ModelComponents) -> TrainedWeights:
    tensors = model_tensors(parts.trained_module())
    layout = {name: TensorSpec.of(tensor) for name, tensor in tensors.items()}
    return TrainedWeights(tensors.items(), layout, 3, "raw")


def run_folder(parts: ModelComponents, base: Path, folder: Path) -> Path:
    """Write what a job leaves: components, one checkpoint and the final adapter."""
    save_components(parts, base, record(), folder / "components")
    save_model(folder / "components", weights(parts), folder / "final")
    checkpoint = folder / "step-00000003"
    checkpoint.mkdir()
    tensors = model_tensors(parts.trained_module())
    shards = {
        ShardSpec(f"{MODEL}{name}", (0,) * tensor.dim()): tensor.detach()
        for name, tensor in tensors.items()
    }
    file = write_file(checkpoint, shard_file_name(0), lambda path: save_shards(path, shards))
    write_marker(checkpoint, 3, 1, "fingerprint", [file])
    return folder
