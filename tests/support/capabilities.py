"""What a machine may lack: a reason to skip a test, or in CI, which brings it, a failure."""

from __future__ import annotations

import os
import shutil
from typing import NoReturn

import pytest


def missing(what: str, required: str = "REQUIRE_CONTAINERS") -> NoReturn:
    """Skip the test; fail it where this variable says that everything should be there."""
    if os.environ.get(required):
        pytest.fail(what)
    pytest.skip(what)


def require_fuse() -> None:
    """What mounting a bucket takes."""
    for program in ("rclone", "fusermount3"):
        if not shutil.which(program):
            missing(f"{program} is not installed; see engine.sh")
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        missing("/dev/fuse cannot be opened here")
