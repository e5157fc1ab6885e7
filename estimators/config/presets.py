"""The model presets that ship with the training code.

They are files of :mod:`sm_train.entrypoints`, which are read here without importing the package.
"""

from __future__ import annotations

import json
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


@cache
def preset_prediction_types(name: str, content: str | None = None) -> tuple[str, ...]:
    """Return what a preset's network can learn to predict, the default first.

    ``content`` is the JSON of a preset that does not ship with sm-train.
    """
    if content is None:
        content = (_presets_folder() / f"{name}.json").read_text(encoding="utf-8")
    preset = json.loads(content)
    diffusion = ("v_prediction", "epsilon") if "diffusion" in preset else ()
    return tuple(dict.fromkeys((preset["prediction_type"], *diffusion)))


@cache
def shared_parts() -> dict[str, dict[str, Any]]:
    """Return the components that presets share, by the name with which presets refer to them."""
    parts = (_presets_folder() / "parts").glob("*.json")
    return {
        one.stem: {"class": "AutoencoderKL"} | json.loads(one.read_text(encoding="utf-8"))
        for one in parts
    }


def _presets_folder() -> Path:
    return entrypoints_folder() / "models" / "presets"
