"""Helpers of the tests of pack options, which other tests use as well."""

from __future__ import annotations

import json
from pathlib import Path

from tests.conftest import Aws


def upload_folder(aws: Aws, folder: Path, prefix: str, region: str = "us-east-1") -> None:
    objects = {
        f"{prefix}{path.relative_to(folder).as_posix()}": path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }
    aws.make_bucket("raw", region, **objects)


def without_root(files: dict[str, bytes]) -> dict[str, bytes]:
    """Return the files of a pack without the address of its images, which only S3's is."""
    plans = {
        name: json.dumps(json.loads(content) | {"root": None}).encode()
        for name, content in files.items()
        if name.startswith("inputs/") and name.endswith("/plan.json")
    }
    assert plans
    return files | plans


def read_objects(aws: Aws, bucket: str, prefix: str) -> dict[str, bytes]:
    s3 = aws.client("s3")
    listed = s3.list_objects_v2(Bucket=bucket, Prefix=prefix).get("Contents", [])
    return {
        entry["Key"].removeprefix(prefix): s3.get_object(Bucket=bucket, Key=entry["Key"])[
            "Body"
        ].read()
        for entry in listed
    }
