"""What a machine may lack: a reason to skip a test, or in CI, which brings it, a failure."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest


def missing(what: str, required: str = "REQUIRE_CONTAINERS") -> NoReturn:
    """Skip the test; fail it where this variable says that everything should be there."""
    if os.environ.get(required):
        pytest.fail(what)
    pytest.skip(what)
