"""Helpers of the tests of local runs in commands, which other tests use as well."""

from __future__ import annotations

from pathlib import Path

from tests.conftest import Cli


def train(cli: Cli, run: Path, *options: str) -> str:
    result = cli("submit", run, "--local", "--nodes", "1", *options, network="loopback")
    assert result.returncode == 0, result.stderr
    return result.stderr
