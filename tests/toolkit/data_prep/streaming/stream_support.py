"""Helpers of the tests of stream, which other tests use as well."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conftest import Aws, Cli
from tests.support.streaming.stack import Stack, stream_stack


@pytest.fixture
def stack(aws: Aws, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stack]:
    with stream_stack(aws, cli, monkeypatch) as running:
        yield running
