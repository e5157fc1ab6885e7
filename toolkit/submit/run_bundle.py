"""Builds the bundle of a run file, with the user code, and finds its commit."""

from __future__ import annotations

import subprocess
from pathlib import Path

from sm_train.estimators.bundle.bundle import Bundle, build_bundle
from sm_train.estimators.bundle.user_code import UserCodeError, read_user_code
from sm_train.estimators.config.schema import RunConfig
from sm_train.estimators.request.launch_plan import pytorch_version
from sm_train.toolkit.base.errors import UserError
from sm_train.toolkit.memory.memory_fit import custom_plan
from sm_train.toolkit.planning.run_price import predicted_speeds


def bundle_of(config: RunConfig, base: Path) -> Bundle:
    """Build the bundle of a run whose file is in ``base``.

    Raises:
        UserError: the user code cannot be bundled; the message shows no part of a secret.
    """
    try:
        user_code = read_user_code(base / config.code) if config.code is not None else None
        return build_bundle(
            config,
            pytorch_version(config),
            user_code,
            predicted_speeds(config),
            custom_plan(config),
        )
    except UserCodeError as error:
        raise UserError(str(error)) from None


def commit_of(folder: Path) -> str | None:
    """Return the commit of the repository of ``folder``, with ``-dirty`` if files differ from it;
    None outside of a repository.
    """
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        result = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, check=False, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() or None
