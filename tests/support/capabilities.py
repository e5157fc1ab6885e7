"""Skips tests whose tools are not installed; in CI, which installs them, fails them instead."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import NoReturn

import pytest


def skip_or_fail(reason: str, required: str = "REQUIRE_CONTAINERS") -> NoReturn:
    """Skip the test, or fail it if the environment variable ``required`` is set."""
    if os.environ.get(required):
        pytest.fail(reason)
    pytest.skip(reason)


def require_fuse() -> None:
    """Skip or fail the test if a bucket cannot be mounted."""
    for program in ("rclone", "fusermount3"):
        if not shutil.which(program):
            skip_or_fail(f"{program} is not installed; see engine.sh")
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        skip_or_fail("/dev/fuse cannot be opened")


def link_optional_package(name: str, folder: Path) -> None:
    """Make a package of ``make optional`` importable by scripts in ``folder``.

    These packages are outside of the environment: diffusers would import them in every process.
    """
    found = [*(Path(sys.prefix) / "optional").glob(f"{name}*")]
    if not found:
        skip_or_fail(f"{name} is not installed; run make optional", "REQUIRE_OPTIONAL")
    for path in found:
        (folder / path.name).symlink_to(path)
