"""The model presets that ship with the training code.

They are files of :mod:`sm_train.entrypoints`, which are read here without importing the package.
"""

from __future__ import annotations

import json
from difflib import get_close_matches
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any


@cache
def entrypoints_folder() -> Path:
    """Return the folder of the code that runs in the cluster."""
    spec = find_spec("sm_train.entrypoints")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("sm_train.entrypoints is not installed")
    return Path(spec.origin).parent


@cache
def preset_names() -> tuple[str, ...]:
    """Return the names of the model presets, sorted."""
    return tuple(sorted(path.stem for path in _presets_folder().glob("*.json")))


_OTHER_NAMES = {
    "sd3": "for Stable Diffusion 3 write mmdit-2b (medium) or mmdit-8b",
    "sd35": "for Stable Diffusion 3.5 write mmdit-2b (medium) or mmdit-8b (large)",
    "flux": "no preset has the size of FLUX.1 (12 B); the nearest are mmdit-8b and mmdit-20b",
    "qwen": "for Qwen-Image write mmdit-20b",
    "pixart": "for PixArt write dit-xl",
    "dit": "write dit-xl",
    "mmdit": "write mmdit-2b, mmdit-8b or mmdit-20b",
    "sd1": "for a Stable Diffusion U-Net write sd2",
    "sd2": "write sd2",
    "stablediffusion": "write sd2, sdxl or mmdit-2b",
    "stablediffusionxl": "write sdxl",
    "bria": "write sd2; `sm-train init --preset bria-2.0` writes the stages of BRIA 2.0",
}
"""Start of another name of a model, without punctuation → what to write."""


def unknown_preset(name: str) -> str:
    """Return why ``name`` is not a preset, with the one that the user may mean."""
    hint = f"; {found}" if (found := preset_hint(name)) else ""
    return f"is not one of {', '.join(preset_names())}, nor a .json file{hint}"


def preset_hint(name: str) -> str | None:
    """Return which preset the user may mean by ``name``; None without a similar one."""
    plain = "".join(character for character in name.lower() if character.isalnum())
    near = max(
        (other_name for other_name in _OTHER_NAMES if plain.startswith(other_name)),
        key=len,
        default=None,
    )
    if near is not None:
        return _OTHER_NAMES[near]
    close = get_close_matches(name.lower(), preset_names(), n=1)
    return f"did you mean {close[0]}?" if close else None


@cache
def preset_prediction_types(name: str, content: str | None = None) -> tuple[str, ...]:
    """Return what a preset's network can learn to predict, the default first.

    ``content`` is the JSON of a preset that does not ship with sm-train.
    """
    preset = _preset(name, content)
    diffusion = ("v_prediction", "epsilon") if "diffusion" in preset else ()
    return tuple(dict.fromkeys((preset["prediction_type"], *diffusion)))


@cache
def resolution_factor(name: str, content: str | None = None) -> int:
    """Return the pixels of which a resolution must be a multiple: the autoencoder's reduction times
    the network's patch.

    ``content`` is the JSON of a preset that does not ship with sm-train.
    """
    preset = _preset(name, content)
    vae = preset["vae"]
    blocks = (shared_parts()[vae] if isinstance(vae, str) else vae or {}).get("block_out_channels")
    reduction: int = 2 ** (len(blocks) - 1) if blocks else 1
    patch: int = preset["network"].get("patch_size", 1)
    return reduction * patch


@cache
def preset_trains_text_encoder(name: str, content: str | None = None) -> bool:
    """Return whether a preset's text encoder is trained with the network."""
    return bool(_preset(name, content).get("train_text_encoder"))


@cache
def preset_layers(name: str, content: str | None = None) -> tuple[str, frozenset[str]]:
    """Return the class of a preset's network, and the names of the layers that it may have.

    The layers of a custom preset are measured later; until then they are those of all shipped
    presets of its class.
    """
    class_name = _preset(name, content)["network"]["class"]
    names = [name] if content is None else preset_names()
    plans = entrypoints_folder() / "planning" / "plans"
    layers: set[str] = set()
    for known_name in names:
        path = plans / f"{known_name}.json"
        if _preset(known_name, None)["network"]["class"] == class_name and path.is_file():
            layers |= json.loads(path.read_text(encoding="utf-8"))["lora_layers"].keys()
    return class_name, frozenset(layers)


def _preset(name: str, content: str | None) -> dict[str, Any]:
    path = _presets_folder() / f"{name}.json"
    preset: dict[str, Any] = json.loads(content or path.read_text(encoding="utf-8"))
    return preset


@cache
def shared_parts() -> dict[str, dict[str, Any]]:
    """Return the components that presets share, by the name with which presets refer to them."""
    parts = (_presets_folder() / "parts").glob("*.json")
    return {
        part.stem: {"class": "AutoencoderKL"} | json.loads(part.read_text(encoding="utf-8"))
        for part in parts
    }


def _presets_folder() -> Path:
    return entrypoints_folder() / "models" / "presets"
