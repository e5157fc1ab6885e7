"""A folder of frozen components in diffusers' layout, told apart without loading it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MOMENTS, TEXT = "moments.npy", "text.npy"
"""Extensions of a sample's precomputed arrays (:mod:`sm_train.entrypoints.precomputed`)."""

PARTS = ("vae", "text_encoder", "tokenizer")


class ComponentsError(ValueError):
    """A folder of components cannot be used; the message is one line."""


def components_digest(folder: Path) -> str:
    """Names an autoencoder and a text encoder: by their configurations and their files' sizes.

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
    for part in PARTS:
        yield from (path for path in sorted((folder / part).rglob("*")) if path.is_file())


def latents_of(folder: Path, resolution: int) -> dict[str, Any]:
    """What an index says of latents: resolution, shapes of the two arrays, and whose they are.

    Raises:
        ComponentsError: the folder is not one of components, or its sizes do not fit.
    """
    vae, text, tokenizer = (
        _read(folder / "vae" / "config.json"),
        _read(folder / "text_encoder" / "config.json"),
        _read(folder / "tokenizer" / "tokenizer_config.json"),
    )
    factor = 2 ** (len(vae["block_out_channels"]) - 1)
    if resolution % factor:
        raise ComponentsError(f"{resolution} pixels: the autoencoder divides sides by {factor}")
    tokens = min(text["max_position_embeddings"], int(tokenizer.get("model_max_length", 10**9)))
    return {
        "resolution": resolution,
        "moments": [2 * vae["latent_channels"], resolution // factor, resolution // factor],
        "text": [tokens, text["hidden_size"]],
        "model": components_digest(folder),
    }


def _read(path: Path) -> dict[str, Any]:
    try:
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise ComponentsError(
            f"{path.parent.parent}: not a folder of components: no {path.parent.name}/{path.name}"
        ) from None
    return document
