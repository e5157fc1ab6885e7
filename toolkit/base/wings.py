"""Wings: folders of one subject each that an installation may lack.

Nothing outside of a wing imports it. Commands and the Python API ask for a module of a wing by its
name, and learn that it is missing.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
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
        raise UserError(f"{missing(name)}; install all of sm-train")
    return module


def missing(name: str) -> str:
    """Return the sentence that the wing of a module is missing, with its subject."""
    wing = _wing(name)
    return f"{wing}: is not installed ({WINGS[wing.rpartition('.')[2]]})"


def optional_module(name: str) -> Any | None:
    """Import a module of a wing; None if this installation lacks the wing."""
    spec = find_spec(_wing(name))
    # A folder in which only caches are left has no origin.
    return None if spec is None or spec.origin is None else import_module(name)


def _wing(name: str) -> str:
    """``sm_train.toolkit.analysis.actual`` → ``sm_train.toolkit.analysis``."""
    return ".".join(name.split(".")[:3])
