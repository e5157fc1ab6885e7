"""Model folders as they are published, from presets, without PyTorch."""

from __future__ import annotations

import json
from math import prod
from typing import Any

from sm_train.entrypoints.models.component_files import numbered_component
from sm_train.entrypoints.models.components import read_preset

Files = dict[str, bytes]
"""A model folder: path → content."""


def safetensors(**shapes: tuple[int, ...]) -> bytes:
    """Return a safetensors file of fp32 zeros."""
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 4 * prod(shape)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [start, end]}
    content = json.dumps(header).encode()
    return len(content).to_bytes(8, "little") + content + bytes(end)


def as_json(document: Any) -> bytes:
    return json.dumps(document).encode()


def published(preset_name: str, **scheduler: Any) -> Files:
    """Return the folder of a model that fits a preset; ``scheduler`` changes its configuration.

    The weights are a single small tensor each: headers are complete, shapes are not.
    """
    preset = read_preset(preset_name)
    network = {key: value for key, value in preset["network"].items() if key != "class"}
    component = "unet" if preset["network"]["class"].startswith("UNet") else "transformer"
    index: dict[str, Any] = {component: ["diffusers", preset["network"]["class"]]}
    files = {
        f"{component}/config.json": as_json(network | {"_class_name": preset["network"]["class"]}),
        f"{component}/diffusion_pytorch_model.safetensors": safetensors(weight=(2, 3)),
        "vae/config.json": as_json(
            {key: value for key, value in preset["vae"].items() if key != "class"}
            | {"_class_name": preset["vae"]["class"]}
        ),
        "vae/diffusion_pytorch_model.safetensors": safetensors(weight=(4, 5)),
        "scheduler/scheduler_config.json": as_json(_scheduler(preset) | scheduler),
    }
    index |= {"vae": ["diffusers", "AutoencoderKL"], "scheduler": ["diffusers", "DDIMScheduler"]}
    for number, encoder in enumerate(preset["text_encoders"]):
        name, tokenizer = (
            numbered_component(prefix, number) for prefix in ("text_encoder", "tokenizer")
        )
        config = {key: value for key, value in encoder.items() if key != "class"}
        files[f"{name}/config.json"] = as_json(config | {"architectures": [encoder["class"]]})
        files[f"{name}/model.safetensors"] = safetensors(weight=(6,))
        files[f"{tokenizer}/tokenizer_config.json"] = as_json({"model_max_length": 77})
        files[f"{tokenizer}/tokenizer.json"] = as_json({})
        index |= {name: ["transformers", encoder["class"]], tokenizer: ["transformers", "T"]}
    files["model_index.json"] = as_json(index | {"_class_name": "Pipeline"})
    return files


def _scheduler(preset: dict[str, Any]) -> dict[str, Any]:
    if preset["prediction_type"] == "flow":
        return {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 3.0}
    return preset["diffusion"] | {
        "_class_name": "DDIMScheduler",
        "prediction_type": preset["prediction_type"],
    }
