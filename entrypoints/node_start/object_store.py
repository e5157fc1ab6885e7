"""Copies between a folder and an S3 prefix."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from sm_train.entrypoints.common.bucket_owner import require_bucket_owners
from sm_train.entrypoints.common.sagemaker_paths import stays_below

if TYPE_CHECKING:
    from types_boto3_s3 import S3Client

_THREADS = 16
_TEMPORARY_SUFFIX = ".part"


class ObjectStoreError(RuntimeError):
    """S3 cannot be used; the message is one line."""


class ObjectStore:
    """The objects below one S3 prefix, which ends with a slash, or the one object that it names."""

    def __init__(self, uri: str) -> None:
        self.uri = uri
        bucket, _, self._prefix = uri.removeprefix("s3://").partition("/")
        self._bucket = bucket
        self._client = _client()

    def sizes(self) -> dict[str, int]:
        """Return the size of each object by its name below the prefix; a folder is no object.

        An object's own URI lists it by its file name.

        Raises:
            ObjectStoreError: a key leads out of the folder to which it would be downloaded.
        """
        found = {}
        pages = self._client.get_paginator("list_objects_v2").paginate(
            Bucket=self._bucket, Prefix=self._prefix
        )
        folder = self._prefix[: self._prefix.rfind("/") + 1]
        for page in pages:
            for one in page.get("Contents", ()):
                key = one["Key"]
                if not key.endswith("/") and (folder == self._prefix or key == self._prefix):
                    name = key.removeprefix(folder)
                    if not stays_below(name):
                        raise ObjectStoreError(
                            f"s3://{self._bucket}: the key {key!r} leads out of its folder; "
                            "remove the object"
                        )
                    found[name] = one["Size"]
        return found

    def download(self, names: Iterable[str], folder: Path) -> None:
        """Download objects to files of the same names below ``folder``, each atomically."""
        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(lambda name: self._download(name, folder / name), names))

    def _download(self, name: str, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}{_TEMPORARY_SUFFIX}")
        self._client.download_file(self._bucket, self._key(name), str(temporary))
        temporary.replace(path)

    def upload(self, name: str, path: Path) -> None:
        self._client.upload_file(str(path), self._bucket, self._key(name))

    def delete(self, name: str) -> None:
        self._client.delete_object(Bucket=self._bucket, Key=self._key(name))

    def _key(self, name: str) -> str:
        return self._prefix[: self._prefix.rfind("/") + 1] + name


def _client() -> S3Client:
    try:
        import boto3
    except ImportError:
        raise ObjectStoreError(
            "the image has no boto3, which copies data and checkpoints from and to S3: install it "
            "in the image, or mount data and checkpoints"
        ) from None
    session = boto3.Session()
    require_bucket_owners(session)
    return session.client("s3")
