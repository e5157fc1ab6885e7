"""Models as files, told apart without loading them: presets, and folders in diffusers' layout."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sm_train.entrypoints.common.job_config import JobConfigError

PRESETS = Path(__file__).parent / "presets"


UNLIMITED_TOKENS = 256
"""Tokens of a caption for a T5 (:data:`sm_train.entrypoints.models.pipeline.T5_TOKENS`)."""


class ComponentsError(ValueError):
    """A folder of components cannot be used; the message is one line."""


def numbered(part: str, number: int) -> str:
    """The folder of a model's text encoders and tokenizers: the first has no number."""
    return part if number == 0 else f"{part}_{number + 1}"


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


def read_preset(name: str) -> dict[str, Any]:
    """The shipped configuration called ``name``; parts that presets share are filled in.

    Raises:
        SettingsError: there is none.
    """
    path = PRESETS / f"{name}.json"
    if not path.is_file():
        raise JobConfigError(f"model.preset: {name!r} is not one of {', '.join(preset_names())}")
    preset: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    preset["vae"] = _shared(preset["vae"])
    preset["text_encoders"] = [_shared(one) for one in preset["text_encoders"]]
    return preset


def _shared(part: Any) -> Any:
    if not isinstance(part, str):
        return part
    return json.loads((PRESETS / "parts" / f"{part}.json").read_text(encoding="utf-8"))


def downsampling(vae: Mapping[str, Any] | None) -> int:
    """Pixels of an image's side for one of a latent: 1 without an autoencoder."""
    return 1 if vae is None else int(2 ** (len(vae["block_out_channels"]) - 1))


def components_digest(folder: Path) -> str:
    """Names an autoencoder and text encoders: by their configurations and their files' sizes.

    Weights are not read: they take minutes, and a file of other weights has seldom the same size
    and configuration. Retrained in place they do: then the digest does not see it.
    """
    digest = hashlib.sha256()
    for path in component_files(folder):
        name = path.relative_to(folder).as_posix()
        digest.update(json.dumps([name, path.stat().st_size]).encode())
        if path.suffix == ".json":
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def component_files(folder: Path) -> Iterator[Path]:
    """What belongs to the components, and nothing else that lies in ``folder``."""
    for part in ("vae", "text_encoder*", "tokenizer*"):
        for found in sorted(folder.glob(part)):
            yield from (path for path in sorted(found.rglob("*")) if path.is_file())


def latents_of(folder: Path, resolution: int) -> dict[str, Any]:
    """What an index says of latents: resolution, shapes of the arrays, and whose they are.

    Raises:
        ComponentsError: the folder is not one of components, or its sizes do not fit.
    """
    vae = _read(folder / "vae" / "config.json")
    factor = downsampling(vae)
    if resolution % factor:
        raise ComponentsError(f"{resolution} pixels: the autoencoder divides sides by {factor}")
    text, pooled = _text_shapes(folder)
    latents = {
        "resolution": resolution,
        "moments": [2 * vae["latent_channels"], resolution // factor, resolution // factor],
        "text": text,
        "model": components_digest(folder),
    }
    return latents | ({"pooled": pooled} if pooled else {})


def _text_shapes(folder: Path) -> tuple[list[int], list[int]]:
    """Of a caption's states and of its pooled projections, as ``pipeline.encode`` makes them."""
    clip, clip_tokens, t5, t5_tokens, pooled, number = 0, 0, 0, 0, 0, 0
    while number == 0 or (folder / numbered("text_encoder", number)).is_dir():
        encoder = _read(folder / numbered("text_encoder", number) / "config.json")
        tokenizer = _read(folder / numbered("tokenizer", number) / "tokenizer_config.json")
        positions = encoder.get("max_position_embeddings", UNLIMITED_TOKENS)
        tokens = min(positions, int(tokenizer.get("model_max_length", 10**9)))
        if encoder.get("model_type") == "t5":
            t5, t5_tokens = encoder["d_model"], tokens
        else:
            clip, clip_tokens = clip + encoder["hidden_size"], tokens
            if "CLIPTextModelWithProjection" in encoder.get("architectures", ()):
                pooled += encoder["projection_dim"]
        number += 1
    return [clip_tokens + t5_tokens, max(clip, t5)], [pooled] if pooled else []


def _read(path: Path) -> dict[str, Any]:
    try:
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise ComponentsError(
            f"{path.parent.parent}: not a folder of components: no {path.parent.name}/{path.name}"
        ) from None
    return document
