"""Helpers of the tests of containers, which other tests use as well."""

from __future__ import annotations

import subprocess

import pytest

from tests.support.capabilities import skip_or_fail


def docker(*arguments: str) -> str:
    result = subprocess.run(["docker", *arguments], capture_output=True, text=True, check=True)
    return result.stdout


@pytest.fixture
def engine() -> None:
    try:
        docker("image", "inspect", "sm-train-local")
    except (OSError, subprocess.CalledProcessError) as error:
        skip_or_fail(f"no container engine with the image sm-train-local; see engine.sh ({error})")
