"""The bundle of a run file on this machine, with the run's own code and the commit it is at."""

from __future__ import annotations

import subprocess
from pathlib import Path

from sm_train.estimators.bundle.bundle import Bundle, build_bundle
from sm_train.estimators.bundle.user_code import UserCodeError, read_user_code
from sm_train.estimators.config.schema import RunConfig
from sm_train.estimators.request.launcher import pytorch_version
from sm_train.toolkit.errors import UserError


def bundle_of(config: RunConfig, base: Path) -> Bundle:
    """The bundle of a run whose file lies in ``base``.

    Raises:
        UserError: the run's own code cannot go along; nothing of a secret is shown.
    """
    try:
        own = read_user_code(base / config.code) if config.code is not None else None
        return build_bundle(config, pytorch_version(config), own)
    except UserCodeError as error:
        raise UserError(str(error)) from None


def commit_of(folder: Path) -> str | None:
    """The commit of the repository around ``folder``, ``-dirty`` where files differ from it."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        answer = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, check=False, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() or None
