"""Measured speeds that cannot be read: `watch` continues without them."""

from __future__ import annotations

import pytest
from sm_train.toolkit.planning.measured_speeds import recorded_speeds

from tests.conftest import Aws
from tests.support.moto_server import aws_session
from tests.support.run_documents import config

RUN = config()
KEY = "demo/cost/measured.json"


@pytest.mark.parametrize("content", [b"{", b'{"format": 99}', b"[]"])
def test_a_record_that_is_damaged_counts_as_none(
    aws: Aws, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", aws.url)
    aws.make_bucket("ai-bucket", **{KEY: content})
    assert recorded_speeds(aws_session(), RUN, "us-east-1") == []
    assert ("GET", f"/ai-bucket/{KEY}") in [(method, path) for method, path, _ in aws.requests]
