"""Read presets and model folders in diffusers' layout without loading weights."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sm_train.cost.speed_model import BF16_PRECISIONS
from sm_train.entrypoints.common.job_config import JobConfigError
from sm_train.entrypoints.models.component_files import (
    ComponentFileError,
    LocalComponents,
    frozen_identities,
    numbered_component,
)

PRESETS = Path(__file__).parent / "presets"

UNLIMITED_TOKENS = 256
"""Tokens of a caption for a T5 (:data:`sm_train.entrypoints.models.pipeline.T5_TOKENS`)."""


class ComponentsError(ValueError):
    """A components folder cannot be used; the message is one line."""


def preset_names() -> list[str]:
    """Return the names of the shipped presets, sorted."""
    return sorted(path.stem for path in PRESETS.glob("*.json"))


def preset_caption_tokens(preset: Mapping[str, Any]) -> int:
    """Return the length of a caption's hidden states.

    CLIP's states are joined along the width; a T5's tokens follow them.
    """
    encoders = preset["text_encoders"]
    clip = [
        encoder["max_position_embeddings"]
        for encoder in encoders
        if "max_position_embeddings" in encoder
    ]
    return max(clip, default=0) + UNLIMITED_TOKENS * (len(encoders) - len(clip))


def read_preset(name: str, content: str | None = None) -> dict[str, Any]:
    """Return the preset called ``name``, with shared component configurations filled in.

    ``content`` is the JSON of a preset that does not ship with sm-train.

    Raises:
        JobConfigError: there is no such preset.
    """
    path = PRESETS / f"{name}.json"
    if content is None and not path.is_file():
        raise JobConfigError(f"model.preset: {name!r} is not one of {', '.join(preset_names())}")
    preset: dict[str, Any] = json.loads(content or path.read_text(encoding="utf-8"))
    preset["vae"] = _resolve_shared(preset["vae"])
    preset["text_encoders"] = [_resolve_shared(encoder) for encoder in preset["text_encoders"]]
    return preset


def _resolve_shared(component: Any) -> Any:
    """Replace the name of a shared configuration by its content."""
    if not isinstance(component, str):
        return component
    return json.loads((PRESETS / "parts" / f"{component}.json").read_text(encoding="utf-8"))


def downsampling(vae: Mapping[str, Any] | None) -> int:
    """Return the pixels of an image's side per latent pixel; 1 without an autoencoder."""
    return 1 if vae is None else int(2 ** (len(vae["block_out_channels"]) - 1))


def encodes_in_fp32(vae: Mapping[str, Any], precision: str, vae_precision: str) -> bool:
    """Return whether an autoencoder of this configuration encodes in fp32.

    ``precision`` and ``vae_precision`` are the run file's. Diffusers' force_upcast (true unless the
    configuration says otherwise) marks autoencoders that need fp32.
    """
    if vae_precision == "auto":
        return precision not in BF16_PRECISIONS or bool(vae.get("force_upcast", True))
    return vae_precision == "fp32"


def component_files(folder: Path) -> Iterator[Path]:
    """Yield the files of frozen components; skip everything else in ``folder``."""
    for pattern in ("vae", "text_encoder*", "tokenizer*"):
        for component in sorted(folder.glob(pattern)):
            yield from (path for path in sorted(component.rglob("*")) if path.is_file())


def describe_latents(folder: Path, resolution: int) -> dict[str, Any]:
    """Return an index's description of latents: resolution, shapes, and identities of components.

    Raises:
        ComponentsError: the folder holds no components, or the resolution does not fit them.
    """
    vae = _read(folder / "vae" / "config.json")
    factor = downsampling(vae)
    if resolution % factor:
        raise ComponentsError(f"resolution: {resolution} must be a multiple of {factor}")
    text, pooled = _text_shapes(folder)
    reader = LocalComponents(folder)
    try:
        identities = frozen_identities(reader)
    except ComponentFileError as error:
        raise ComponentsError(f"{folder}: {error}") from None
    latents = {
        "resolution": resolution,
        "moments": [2 * vae["latent_channels"], resolution // factor, resolution // factor],
        "text": text,
        "sizes": [4],
        "model": identities,
    }
    return latents | ({"pooled": pooled} if pooled else {})


def _text_shapes(folder: Path) -> tuple[list[int], list[int]]:
    """Return the shapes of a caption's hidden states and pooled projections.

    They are those of :func:`sm_train.entrypoints.models.pipeline.encode`: CLIP states are joined
    along the width, T5 states along the length.
    """
    clip_width = clip_tokens = t5_width = t5_tokens = pooled_width = index = 0
    while index == 0 or (folder / numbered_component("text_encoder", index)).is_dir():
        encoder = _read(folder / numbered_component("text_encoder", index) / "config.json")
        tokenizer = _read(folder / numbered_component("tokenizer", index) / "tokenizer_config.json")
        positions = encoder.get("max_position_embeddings", UNLIMITED_TOKENS)
        tokens = min(positions, int(tokenizer.get("model_max_length", 10**9)))
        if encoder.get("model_type") == "t5":
            t5_width, t5_tokens = encoder["d_model"], tokens
        else:
            clip_width, clip_tokens = clip_width + encoder["hidden_size"], tokens
            if "CLIPTextModelWithProjection" in encoder.get("architectures", ()):
                pooled_width += encoder["projection_dim"]
        index += 1
    states = [clip_tokens + t5_tokens, max(clip_width, t5_width)]
    return states, [pooled_width] if pooled_width else []


def _read(path: Path) -> dict[str, Any]:
    try:
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        raise ComponentsError(
            f"{path.parent.parent}: not a components folder: no readable "
            f"{path.parent.name}/{path.name}"
        ) from None
    return document
