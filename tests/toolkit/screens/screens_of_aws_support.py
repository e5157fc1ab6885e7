"""Helpers of the tests of screens of aws, which other tests use as well."""

from __future__ import annotations

AWS_SCREENS: dict[str, list[str]] = {
    "list": ["list"],
    "status": ["status", "demo"],
    "watch": ["watch", "demo", "--once", "--dry-run"],
    "logs": ["logs", "demo"],
    "alarms": ["alarms", "demo", "--topic", "arn:aws:sns:us-east-1:345678901234:team", "--dry-run"],
    "stop": ["stop", "demo"],
    "resume-refused": ["resume", "demo"],
}
"""File → the command, in the order in which the test runs them on one job."""


STREAM_SCREENS: dict[str, list[str]] = {
    "stream": ["stream", "photo-pack"],
    "stream-add": ["stream", "photo-pack", "--add", "s3://raw/2025/", "--dry-run"],
}
"""File → the command, on one streaming pack."""
