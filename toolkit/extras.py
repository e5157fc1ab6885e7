"""Packages that only some features need: the extras of sm-train's installation."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Literal

from sm_train.toolkit.errors import UserError

Extra = Literal["aws", "heic", "hub", "notebook", "report", "tensorboard", "train", "where"]


def require_extra(extra: Extra, *modules: str, purpose: str) -> None:
    """Refuse to continue without ``modules``, which the extra ``extra`` installs.

    They are found but not imported: an import takes seconds.

    Raises:
        UserError: one of them is not installed; the message names the command that installs it.
    """
    for module in modules:
        if not is_installed(module):
            raise UserError(
                f'{module}: is not installed; {purpose} needs it: pip install "sm-train[{extra}]"'
            )


def require_local_run(*, in_containers: bool = False) -> None:
    """Refuse a local run without the packages of a training process.

    Raises:
        UserError: one is not installed.
    """
    in_process = () if in_containers else ("torch", "accelerate", "diffusers")
    require_extra("train", "psutil", *in_process, purpose="a local run")
    if in_containers:
        require_extra("aws", "sagemaker", purpose="a local run in containers")


def is_installed(module: str) -> bool:
    """Return whether ``module`` can be imported."""
    try:
        return find_spec(module) is not None
    except ImportError:
        return False
