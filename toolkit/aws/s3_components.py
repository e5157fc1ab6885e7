"""A model folder in S3, read by ranges (:mod:`sm_train.entrypoints.models.component_files`)."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from sm_train.toolkit.aws.s3 import split_uri

if TYPE_CHECKING:
    from types_boto3_s3 import S3Client


class S3Components:
    """The objects below ``uri``; methods raise S3's errors unchanged."""

    def __init__(self, s3: S3Client, uri: str) -> None:
        self._s3 = s3
        self.location = uri
        self._bucket, self._prefix = split_uri(uri.rstrip("/") + "/")

    @cached_property
    def files(self) -> dict[str, int]:
        pages = self._s3.get_paginator("list_objects_v2").paginate(
            Bucket=self._bucket, Prefix=self._prefix
        )
        return {
            entry["Key"].removeprefix(self._prefix): entry["Size"]
            for page in pages
            for entry in page.get("Contents", ())
            if not entry["Key"].endswith("/")
        }

    def read(self, path: str, start: int, length: int) -> bytes:
        """Return a range of an object; see ``ComponentReader``."""
        end = min(start + length, self.files[path]) - 1
        if end < start:
            return b""
        response = self._s3.get_object(
            Bucket=self._bucket, Key=f"{self._prefix}{path}", Range=f"bytes={start}-{end}"
        )
        return response["Body"].read()
