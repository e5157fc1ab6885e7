"""Finds values that were copied from documentation and never replaced by the user's own."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from sm_train.estimators.config.consistency import KeyPath
from sm_train.estimators.config.schema import RunConfig

_ACCOUNTS = ("111122223333", "123456789012", "444455556666", "777788889999")
"""Accounts of AWS's documentation (examples of the IAM user guide, 2026-11); nobody has them."""

_BUCKET = r"my-bucket|doc-example-bucket\d*|amzn-s3-demo-[a-z0-9.-]*"
"""Buckets of documentation; S3 reserves names that start with amzn-s3-demo- (S3 user guide,
bucket naming rules, 2026-11)."""

_PLACEHOLDER = re.compile(
    rf"^(?:s3://)?(?P<bucket>{_BUCKET})(?:/|$)"
    rf"|(?:^|:)(?P<account>{'|'.join(_ACCOUNTS)})(?=:|\.dkr\.ecr\.|$)"
    r"|^(?P<registry>[a-z.]*\bexample\.com)/"
)
_SECTIONS = (
    "role",
    "bucket",
    "bucket_owners",
    "output_kms_key",
    "data",
    "model",
    "channels",
    "cluster",
    "kubernetes",
    "alerts",
    "trackers",
    "recovery",
)
_FREE_TEXT = ("environment", "preset_content")


class Placeholder(NamedTuple):
    """A key of the run file whose value is from documentation; ``value`` is the part that is."""

    path: KeyPath
    value: str

    @property
    def fix(self) -> str:
        """Return what to write instead."""
        if self.value.isdigit():
            return "write your own account's ID"
        is_registry = self.value.endswith("example.com")
        return f"write your own {'registry' if is_registry else 'bucket'}"


def find_placeholders(config: RunConfig) -> list[Placeholder]:
    """Return the keys that still hold an account, a bucket or a registry of documentation."""
    document = config.model_dump(mode="json", exclude_none=True, include=set(_SECTIONS))
    return [
        Placeholder(path, matched["bucket"] or matched["account"] or matched["registry"])
        for section in _SECTIONS
        for path, text in _texts(document.get(section), (section,))
        if (matched := _PLACEHOLDER.search(text))
    ]


def _texts(value: Any, path: KeyPath) -> Iterator[tuple[KeyPath, str]]:
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            if key not in _FREE_TEXT:
                yield from _texts(item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _texts(item, (*path, index))
