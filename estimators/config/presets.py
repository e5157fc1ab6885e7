"""The model presets that ship with the training code.

They are files of :mod:`sm_train.entrypoints`, which are read here without importing the package.
"""

from __future__ import annotations

import json
from functools import cache
from importlib.util import find_spec
from pathlib import Path


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
def preset_prediction_types(name: str) -> tuple[str, ...]:
    """Return what a preset's network can learn to predict, the default first."""
    preset = json.loads((_presets_folder() / f"{name}.json").read_text(encoding="utf-8"))
    diffusion = ("v_prediction", "epsilon") if "diffusion" in preset else ()
    return tuple(dict.fromkeys((preset["prediction_type"], *diffusion)))


def _presets_folder() -> Path:
    return entrypoints_folder() / "models" / "presets"
