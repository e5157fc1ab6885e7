"""Functions of the user's code, which the run file names as ``module:function``."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from sm_train.entrypoints.job_interface.job_config import JobConfigError


def is_user_function(name: str) -> bool:
    """Return whether a setting's ``name`` is of the form ``module:function``."""
    return ":" in name


def load_user_function(key: str, name: str) -> Callable[..., Any]:
    """Import the function or class ``name``, the value of the run file's ``key``.

    Modules of the user's code lie at the top of the bundle, next to the entry script.

    Raises:
        JobConfigError: the module or the function does not exist, or cannot be called.
    """
    module_name, _, attribute = name.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise JobConfigError(
            f"{key}: {name}: no module {error.name}; add it to the folder of code, or its package "
            "to the folder's requirements.txt"
        ) from None
    for part in attribute.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        raise JobConfigError(f"{key}: {name}: {module_name} has no function {attribute}")
    function: Callable[..., Any] = found
    return function
