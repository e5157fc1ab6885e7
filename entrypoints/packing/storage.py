"""Files in a folder or below an S3 prefix, read whole and written whole or not at all.

A name is a path with forward slashes below the place. Nothing half-written is ever seen under its
name: a folder's file gets it when every byte is on the disk, an S3 object when the last part of
its upload is.
"""

from __future__ import annotations

import io
import os
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from botocore.exceptions import ClientError

PART_BYTES = 16 * 2**20
"""Of a multipart upload; S3 allows 10,000 parts, so objects of up to 160 GB."""

_PARTS = 1024  # of one writev, at most (IOV_MAX of Linux)

RANGE_BYTES = 8 * 2**20
"""Read at once: most images are one request, and a broken connection costs no more than that."""


UploadPart = bytes | memoryview


class ShardSink(Protocol):
    """What a shard is written to."""

    def write(self, content: bytes, /) -> None: ...

    def writelines(self, parts: Sequence[UploadPart], /) -> None:
        """Write one behind the other."""


class Storage(Protocol):
    """A folder or a prefix; can be pickled."""

    def read(self, name: str) -> bytes:
        """The whole content.

        Raises:
            FileNotFoundError: there is nothing of that name.
            OSError: it cannot be read.
        """

    def size(self, name: str) -> int | None:
        """Bytes; None where there is nothing of that name."""

    def remove(self, name: str) -> None:
        """Remove it if it is there."""

    def writing(self, name: str) -> Any:
        """A context with a :class:`ShardSink`; leaving it gives the content its name."""

    def holds(self, folder: str) -> bool:
        """Whether anything lies below ``folder``."""

    def changed_ns(self, name: str) -> int:
        """When it was last written, Unix nanoseconds; it is there."""

    def stamp(self, name: str, changed_ns: int) -> None:
        """Say that it was written at ``changed_ns``, where the place can keep that."""

    def shown(self, name: str) -> str:
        """Its address, for a person."""


@dataclass(frozen=True)
class Access:
    """How to reach S3: an AWS profile and a region, or what the environment says."""

    profile: str | None = None
    region: str | None = None


@lru_cache(maxsize=4)
def s3_client(access: Access) -> Any:
    """One client for each process; its methods may be called by many threads."""
    import boto3
    from botocore.config import Config

    session: Any = boto3.Session(profile_name=access.profile, region_name=access.region)
    config = Config(max_pool_connections=64, retries={"mode": "adaptive", "max_attempts": 10})
    return session.client("s3", config=config)


def open_storage(address: str, access: Access) -> Storage:
    """The place of a local path or an ``s3://`` address."""
    if address.startswith("s3://"):
        bucket, _, prefix = address.removeprefix("s3://").partition("/")
        return S3Prefix(bucket, prefix.rstrip("/") + "/" if prefix.rstrip("/") else "", access)
    return LocalFolder(Path(address))


def read_uri(address: str, access: Access) -> bytes:
    """The content of a local path or of an ``s3://`` object.

    Raises:
        OSError: it is not there (FileNotFoundError) or cannot be read.
    """
    if address.startswith("s3://"):
        bucket, _, key = address.removeprefix("s3://").partition("/")
        return _get(s3_client(access), bucket, key)
    with open(address, "rb", buffering=0) as file:  # noqa: PTH123  a Path costs more than the call
        return file.readall()


@dataclass(frozen=True)
class LocalFolder:
    """A folder of this machine."""

    path: Path

    def read(self, name: str) -> bytes:
        return (self.path / name).read_bytes()

    def size(self, name: str) -> int | None:
        try:
            return (self.path / name).stat().st_size
        except FileNotFoundError:
            return None

    def remove(self, name: str) -> None:
        (self.path / name).unlink(missing_ok=True)

    @contextmanager
    def writing(self, name: str) -> Iterator[ShardSink]:
        final = self.path / name
        final.parent.mkdir(parents=True, exist_ok=True)
        partial = final.with_name(f".{final.name}.part")
        file = partial.open("wb", buffering=0)
        try:
            yield _FileSink(file.fileno())
            os.fsync(file.fileno())
            file.close()
            partial.replace(final)
        except BaseException as error:
            with suppress(OSError):
                file.close()
            partial.unlink(missing_ok=True)
            if isinstance(error, OSError) and error.filename is None:
                error.filename = str(final)  # a write to a full disk does not say where
            raise
        _sync_folder(final.parent)

    def holds(self, folder: str) -> bool:
        below = self.path / folder
        return below.exists() and (not below.is_dir() or any(below.iterdir()))

    def changed_ns(self, name: str) -> int:
        return (self.path / name).stat().st_mtime_ns

    def stamp(self, name: str, changed_ns: int) -> None:
        os.utime(self.path / name, ns=(changed_ns, changed_ns))

    def shown(self, name: str) -> str:
        return str(self.path / name)


class _FileSink:
    """Writes at once, without a copy in between."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def write(self, content: bytes) -> None:
        self.writelines([content])

    def writelines(self, parts: Sequence[UploadPart]) -> None:
        for first in range(0, len(parts), _PARTS):
            self._write_whole(parts[first : first + _PARTS])

    def _write_whole(self, parts: Sequence[UploadPart]) -> None:
        left = sum(map(len, parts)) - os.writev(self._descriptor, parts)
        if left:  # the disk is full, or a signal came: the rest, or the error, comes now
            rest = memoryview(b"".join(parts))
            while left:
                left -= os.write(self._descriptor, rest[-left:])


def _sync_folder(folder: Path) -> None:
    """Put the folder's names on the disk, too."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@dataclass(frozen=True)
class S3Prefix:
    """The objects below a prefix, which ends with a slash or is empty."""

    bucket: str
    prefix: str
    access: Access

    def read(self, name: str) -> bytes:
        return _get(s3_client(self.access), self.bucket, self.prefix + name)

    def size(self, name: str) -> int | None:
        from botocore.exceptions import ClientError

        try:
            found = s3_client(self.access).head_object(Bucket=self.bucket, Key=self.prefix + name)
        except ClientError as error:
            if is_missing(error):
                return None
            raise
        size: int = found["ContentLength"]
        return size

    def remove(self, name: str) -> None:
        s3_client(self.access).delete_object(Bucket=self.bucket, Key=self.prefix + name)

    def create(self, name: str, content: bytes) -> bool:
        """Put an object if there is none of that name; whether there was none."""
        from botocore.exceptions import ClientError

        place = {"Bucket": self.bucket, "Key": self.prefix + name}
        try:
            s3_client(self.access).put_object(Body=content, IfNoneMatch="*", **place)
        except ClientError as error:
            # 409: another put of that name is under way; it will be there.
            code = error.response["Error"].get("Code")
            if code in ("PreconditionFailed", "ConditionalRequestConflict"):
                return False
            raise
        return True

    def names(self, folder: str) -> dict[str, int]:
        """Everything below ``folder``: its name there, and its bytes."""
        below = f"{self.prefix}{folder}/"
        pages = s3_client(self.access).get_paginator("list_objects_v2")
        return {
            one["Key"].removeprefix(below): one["Size"]
            for page in pages.paginate(Bucket=self.bucket, Prefix=below)
            for one in page.get("Contents", [])
        }

    def give_up_uploads(
        self, folder: str, *, before: datetime | None = None, names: Container[str] | None = None
    ) -> int:
        """End uploads below ``folder`` that were never completed: their parts are billed.

        Those begun ``before``, or those of ``names`` there; returns how many it were.
        """
        client, place = s3_client(self.access), {"Bucket": self.bucket}
        below = f"{self.prefix}{folder}/"
        pages = client.get_paginator("list_multipart_uploads")
        given_up = 0
        for page in pages.paginate(Prefix=below, **place):
            for one in page.get("Uploads", []):
                old = before is None or one["Initiated"] < before
                if old and (names is None or one["Key"].removeprefix(below) in names):
                    client.abort_multipart_upload(Key=one["Key"], UploadId=one["UploadId"], **place)
                    given_up += 1
        return given_up

    @contextmanager
    def writing(self, name: str) -> Iterator[ShardSink]:
        upload = _Upload(s3_client(self.access), self.bucket, self.prefix + name)
        try:
            yield upload
            upload.complete()
        except BaseException:
            upload.abort()
            raise

    def holds(self, folder: str) -> bool:
        place = {"Bucket": self.bucket, "Prefix": f"{self.prefix}{folder}/"}
        return bool(s3_client(self.access).list_objects_v2(MaxKeys=1, **place).get("KeyCount"))

    def changed_ns(self, name: str) -> int:
        found = s3_client(self.access).head_object(Bucket=self.bucket, Key=self.prefix + name)
        return int(found["LastModified"].timestamp() * 1e9)

    def stamp(self, name: str, changed_ns: int) -> None:
        """S3 keeps its own time."""

    def shown(self, name: str) -> str:
        return f"s3://{self.bucket}/{self.prefix}{name}"


class _Upload:
    """A multipart upload; what fits in one part is put at once."""

    def __init__(self, client: Any, bucket: str, key: str) -> None:
        self._client, self._place = client, {"Bucket": bucket, "Key": key}
        self._held = io.BytesIO()
        self._id: str | None = None
        self._parts: list[dict[str, Any]] = []

    def write(self, content: bytes) -> None:
        self.writelines([content])

    def writelines(self, parts: Sequence[UploadPart]) -> None:
        for part in parts:
            self._held.write(part)
        if self._held.tell() >= PART_BYTES:
            self._send()

    def complete(self) -> None:
        if self._id is None:
            self._client.put_object(Body=self._held.getvalue(), **self._place)
            return
        if self._held.tell():
            self._send()
        parts = {"Parts": self._parts}
        self._client.complete_multipart_upload(
            UploadId=self._id, MultipartUpload=parts, **self._place
        )

    def abort(self) -> None:
        if self._id is not None:
            # What stays is billed: best effort here, and a lifecycle rule for the rest.
            with suppress(Exception):
                self._client.abort_multipart_upload(UploadId=self._id, **self._place)

    def _send(self) -> None:
        if self._id is None:
            self._id = self._client.create_multipart_upload(**self._place)["UploadId"]
        number = len(self._parts) + 1
        answer = self._client.upload_part(
            UploadId=self._id, PartNumber=number, Body=self._held.getvalue(), **self._place
        )
        self._parts.append({"PartNumber": number, "ETag": answer["ETag"]})
        self._held = io.BytesIO()


def _ranges(client: Any, bucket: str, key: str) -> Iterator[bytes]:
    """An object piece by piece, all of one version of it."""
    from botocore.exceptions import ClientError

    place = {"Bucket": bucket, "Key": key}
    done, total = 0, 1
    while done < total:
        try:
            answer = client.get_object(Range=f"bytes={done}-{done + RANGE_BYTES - 1}", **place)
        except ClientError as error:
            if done == 0 and error.response["Error"].get("Code") == "InvalidRange":
                return  # it is empty
            raise
        total = int(answer["ContentRange"].rpartition("/")[2])
        place["IfMatch"] = answer["ETag"]
        content: bytes = answer["Body"].read()
        done += len(content)
        yield content


def is_missing(error: ClientError) -> bool:
    """Whether S3 answers that there is no such object."""
    return error.response["Error"].get("Code") in ("404", "NoSuchKey")


def _get(client: Any, bucket: str, key: str) -> bytes:
    """Raises what the file system would: a missing or forbidden object is an OSError."""
    from botocore.exceptions import BotoCoreError, ClientError

    address = f"s3://{bucket}/{key}"
    try:
        content = b"".join(_ranges(client, bucket, key))
    except ClientError as error:
        code = error.response["Error"].get("Code", "")
        if is_missing(error):
            raise FileNotFoundError(2, "no such object", address) from None
        if code in ("403", "AccessDenied"):
            raise PermissionError(13, "S3 answers AccessDenied", address) from None
        raise OSError(5, f"S3 answers {code}", address) from None
    except BotoCoreError as error:
        raise OSError(5, str(error), address) from None
    return content
