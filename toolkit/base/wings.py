"""Wings: folders of one subject each that an installation may lack.

Nothing outside of a wing imports it. Commands and the Python API ask for a module of a wing by its
name, and learn that it is missing.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from sm_train.toolkit.base.errors import UserError

WINGS = {
    "analysis": "why jobs failed, how well they used their time and what they cost",
    "clusters": "runs on Kubernetes and Slurm",
    "data_prep": "packs, indices, columns and removals of images",
    "probes": "measurements and tests of a cluster before a run",
}
"""Folder below ``toolkit`` → its subject."""


def wing_module(name: str) -> Any:
    """Import a module of a wing, such as ``sm_train.toolkit.analysis.actual``.

    Raises:
        UserError: this installation lacks the wing.
    """
    module = optional_module(name)
    if module is None:
        wing = _wing(name)
        subject = WINGS[wing.rpartition(".")[2]]
        raise UserError(f"{wing}: is not installed ({subject}); install all of sm-train")
    return module


def optional_module(name: str) -> Any | None:
    """Import a module of a wing; None if this installation lacks the wing."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name != _wing(name):
            raise
        return None


def _wing(name: str) -> str:
    """``sm_train.toolkit.analysis.actual`` → ``sm_train.toolkit.analysis``."""
    return ".".join(name.split(".")[:3])
