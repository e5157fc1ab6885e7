"""Chooses the diffusers pipeline class that a final model names in its ``model_index.json``.

A standard class opens without ``trust_remote_code`` and brings LoRA, img2img and the other features
of diffusers. :class:`~sm_train.entrypoints.models.pipeline.TextToImagePipeline` remains for models
that no standard class can run: on pixels, and PixArt trained as a rectified flow (PixArt's
pipelines scale the first noise by ``init_noise_sigma``, which flow schedulers lack).
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

_CLIP, _CLIP_PROJECTED, _T5 = "CLIPTextModel", "CLIPTextModelWithProjection", "T5EncoderModel"
_FLOW_SCHEDULER = "FlowMatchEulerDiscreteScheduler"

_SETTINGS: dict[str, dict[str, Any]] = {
    "StableDiffusionPipeline": {"requires_safety_checker": False},
    # Caption dropout encodes the empty caption, so classifier-free guidance does too; diffusers
    # would use zeros. The watermark would change the image if invisible-watermark is installed.
    "StableDiffusionXLPipeline": {"force_zeros_for_empty_prompt": False, "add_watermarker": False},
}
"""Arguments of a pipeline class that differ from diffusers' defaults."""


def standard_pipeline(
    network: Mapping[str, Any],
    text_encoders: Sequence[str],
    scheduler: str,
    *,
    has_vae: bool,
) -> str | None:
    """Return diffusers' pipeline class that runs a model; None if there is none.

    ``network`` is its configuration as diffusers saves it. ``text_encoders`` and ``scheduler`` are
    class names, the former in the order of their folders.
    """
    is_flow = scheduler == _FLOW_SCHEDULER
    encoders = tuple(text_encoders)
    if not has_vae:
        return None
    match network["_class_name"]:
        case "UNet2DConditionModel" if not is_flow:
            return _unet_pipeline(network, encoders)
        case "SD3Transformer2DModel" if is_flow:
            clip = (_CLIP_PROJECTED, _CLIP_PROJECTED)
            return "StableDiffusion3Pipeline" if encoders in (clip, (*clip, _T5)) else None
        case "PixArtTransformer2DModel" if not is_flow and encoders == (_T5,):
            return _pixart_pipeline(network)
    return None


def _unet_pipeline(network: Mapping[str, Any], encoders: tuple[str, ...]) -> str | None:
    if network.get("addition_embed_type") == "text_time":
        return "StableDiffusionXLPipeline" if encoders == (_CLIP, _CLIP_PROJECTED) else None
    return "StableDiffusionPipeline" if encoders == (_CLIP,) else None


def _pixart_pipeline(network: Mapping[str, Any]) -> str | None:
    """PixArt-Alpha's pipeline passes the image's size at 1024 px only, and Sigma's never."""
    if not network.get("use_additional_conditions"):
        return "PixArtSigmaPipeline"
    return "PixArtAlphaPipeline" if network["sample_size"] == 128 else None


def loads_adapters(class_name: str | list[str]) -> bool:
    """Return whether the pipeline class of a model's index has ``load_lora_weights``."""
    import diffusers

    pipeline = getattr(diffusers, class_name, None) if isinstance(class_name, str) else None
    return hasattr(pipeline, "load_lora_weights")


def standard_index(class_name: str, components: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of ``model_index.json`` for a standard class.

    ``components`` maps folder names to library and class. Components that the class requires and
    the model lacks, such as a safety checker, are listed as absent.
    """
    import diffusers

    parameters = inspect.signature(getattr(diffusers, class_name).__init__).parameters.values()
    required = [
        parameter.name
        for parameter in parameters
        if parameter.name != "self" and parameter.default is inspect.Parameter.empty
    ]
    present = {name: entry for name, entry in components.items() if entry != [None, None]}
    absent = {name: [None, None] for name in required if name not in present}
    settings = _SETTINGS.get(class_name, {})
    return present | absent | settings | {"_class_name": class_name}
