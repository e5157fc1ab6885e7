"""Small models with random weights, saved as a job saves them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from sm_train.entrypoints.common.job_config import ModelConfig
from sm_train.entrypoints.models.builder import ModelComponents, build_components
from sm_train.entrypoints.models.export import TrainedWeights, save_components, save_model
from sm_train.entrypoints.models.model_card import TrainingRecord
from sm_train.entrypoints.models.weight_files import TensorSpec


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
        "bundle": "b1",
        "commit": None,
        "prompts": ("a grey of 3",),
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
