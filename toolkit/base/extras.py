"""Packages that only some features need: the extras of sm-train's installation."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from sm_train.entrypoints.base.pip_install import install_command
from sm_train.toolkit.base.errors import UserError

CPU_PACKAGES = "https://download.pytorch.org/whl/cpu"
"""PyTorch's own package index with its builds for CPUs, which are a seventh of those with CUDA."""

_GPU_DRIVER = Path("/proc/driver/nvidia")

Extra = Literal["aws", "heic", "hub", "notebook", "report", "tensorboard", "train", "where"]

_MODULES = {
    "aws": ("boto3", "botocore", "s3transfer", "sagemaker", "tenacity"),
    "train": (
        *("torch", "accelerate", "diffusers", "transformers", "tokenizers", "safetensors"),
        *("psutil", "webdataset", "pynvml"),
    ),
    "heic": ("pillow_heif",),
    "hub": ("huggingface_hub",),
    "lora": ("peft",),
    "notebook": ("pandas",),
    "report": ("matplotlib",),
    "tensorboard": ("tensorboard",),
    "trackers": ("wandb", "mlflow"),
    "where": ("duckdb",),
}
"""Extra → the modules that it adds to the base installation and that the product imports.

A module of several extras is in the smallest one."""


def require_extra(extra: Extra, *modules: str, purpose: str) -> None:
    """Refuse to continue without ``modules``, which the extra ``extra`` installs.

    They are found but not imported: an import takes seconds.

    Raises:
        UserError: one of them is not installed; the message names the command that installs it.
    """
    for module in modules:
        if not is_installed(module):
            raise _missing(module, extra, purpose)


def missing_extra(error: ModuleNotFoundError) -> UserError | None:
    """Return the message for a failed import of an extra's module; None for another module."""
    module = (error.name or "").partition(".")[0]
    for extra, modules in _MODULES.items():
        if module in modules:
            return _missing(module, extra, "this command")
    return None


def _missing(module: str, extra: str, purpose: str) -> UserError:
    command = install_command(extra)
    if extra == "train" and not _GPU_DRIVER.exists():
        command += f" --extra-index-url {CPU_PACKAGES}"
    return UserError(f"{module}: is not installed; {purpose} needs it: {command}")


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
