"""Helpers of the tests of run, which other tests use as well."""

from __future__ import annotations

import pytest

from tests.conftest import Aws

SHARDS = {f"shards/{index}.tar": b"x" for index in range(4)} | {"index.parquet": b"x"}


@pytest.fixture
def account(aws: Aws, monkeypatch: pytest.MonkeyPatch) -> Aws:
    """An account with the run's bucket and shards; this process has credentials for it."""
    aws.make_bucket("ai-bucket", **SHARDS)
    for name, value in aws.environment.items():
        monkeypatch.setenv(name, value)
    return aws
