"""Copies between a folder and an S3 prefix."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from sm_train.entrypoints.base.sagemaker_paths import stays_below
from sm_train.entrypoints.storage.store import ObjectStore, S3Access, StoredObject, open_store

_THREADS = 16
_TEMPORARY_SUFFIX = ".part"


class PrefixError(RuntimeError):
    """S3 cannot be used; the message is one line."""


class PrefixFiles:
    """The objects below one S3 prefix, which ends with a slash, or the one object that it names."""

    def __init__(self, uri: str) -> None:
        self.uri = uri
        bucket, _, self._prefix = uri.removeprefix("s3://").partition("/")
        self._bucket = bucket
        self._store = _store()

    def sizes(self) -> dict[str, int]:
        """Return the size of each object by its name below the prefix.

        Raises:
            PrefixError: as :meth:`objects`.
        """
        return {name: stored.bytes for name, stored in self.objects().items()}

    def objects(self) -> dict[str, StoredObject]:
        """Return each object by its name below the prefix; a folder is no object.

        An object's own URI lists it by its file name.

        Raises:
            PrefixError: a key leads out of the folder to which it would be downloaded.
        """
        found = {}
        folder = self._key("")
        for stored in self._store.objects(self._bucket, self._prefix):
            key = stored.key
            if not key.endswith("/") and (folder == self._prefix or key == self._prefix):
                name = key.removeprefix(folder)
                if not stays_below(name):
                    raise PrefixError(
                        f"s3://{self._bucket}: the key {key!r} leads out of its folder; "
                        "remove the object"
                    )
                found[name] = stored
        return found

    def read(self, name: str) -> bytes:
        """Return the content of a small object."""
        return self._store.read(self._bucket, self._key(name))

    def download(self, names: Iterable[str], folder: Path) -> None:
        """Download objects to files of the same names below ``folder``, each atomically."""
        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(lambda name: self._download(name, folder / name), names))

    def _download(self, name: str, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}{_TEMPORARY_SUFFIX}")
        self._store.download(self._bucket, self._key(name), temporary)
        temporary.replace(path)

    def upload(self, name: str, path: Path) -> None:
        self._store.upload(path, self._bucket, self._key(name))

    def delete(self, name: str) -> None:
        self._store.delete(self._bucket, self._key(name))

    def _key(self, name: str) -> str:
        return self._prefix[: self._prefix.rfind("/") + 1] + name


def _store() -> ObjectStore:
    try:
        return open_store(S3Access())
    except ImportError:
        raise PrefixError(
            "the image has no boto3, which copies data and checkpoints from and to S3: install it "
            "in the image, or mount data and checkpoints"
        ) from None
