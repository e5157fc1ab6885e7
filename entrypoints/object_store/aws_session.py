"""Prepares every boto3 session of the product."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sm_train.entrypoints.object_store.bucket_parameters import send_bucket_parameters
from sm_train.entrypoints.object_store.foreign_answers import refuse_foreign_answers

if TYPE_CHECKING:
    import boto3


def prepare_session(session: boto3.Session) -> None:
    """Make the session's clients name buckets' owners and keys, and refuse a proxy's page."""
    refuse_foreign_answers(session, send_bucket_parameters(session))
