"""The manifest of a copied model: where it comes from, and the digest of each file.

``sm-train fetch-model`` writes it next to ``model_index.json``; ``sm-train check`` and the training
job compare the files with it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from sm_train.entrypoints.models.component_files import (
    ComponentFileError,
    ComponentReader,
    read_json,
)

MANIFEST_FILE = "sm-train-model.json"

_FORMAT = 1
_SMALL_BYTES = 5_000_000
"""Files up to this size are read and digested by every check: configurations and vocabularies."""
_BLOCK_BYTES = 2**20
_THREADS = 8


@dataclass(frozen=True)
class FileDigest:
    """Size in bytes and SHA-256 of a file, which is the Hub's own digest of large files."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class ModelManifest:
    """A copy of ``repository`` at the commit ``revision``; ``files`` by their paths."""

    repository: str
    revision: str
    files: Mapping[str, FileDigest]

    def to_json(self) -> str:
        """Return the content of :data:`MANIFEST_FILE`."""
        document = {"format": _FORMAT, **asdict(self)}
        return json.dumps(document, indent=2, sort_keys=True) + "\n"


def read_manifest(reader: ComponentReader) -> ModelManifest | None:
    """Return the manifest of a model folder; None if it has none.

    Raises:
        ComponentFileError: it is damaged or of another format.
    """
    if MANIFEST_FILE not in reader.files:
        return None
    document = read_json(reader, MANIFEST_FILE)
    try:
        if document["format"] != _FORMAT:
            raise ValueError
        files = {path: FileDigest(**entry) for path, entry in document["files"].items()}
        return ModelManifest(document["repository"], document["revision"], files)
    except (KeyError, TypeError, ValueError, AttributeError):
        raise ComponentFileError(
            f"{MANIFEST_FILE} is damaged or of another version; run sm-train fetch-model again"
        ) from None


def manifest_problems(reader: ComponentReader) -> Iterator[str]:
    """Yield files that are missing or differ: by size, small ones by their digest.

    Raises:
        ComponentFileError: the manifest is damaged.
    """
    manifest = read_manifest(reader)
    if manifest is None:
        return
    for path, expected in manifest.files.items():
        size = reader.files.get(path)
        if size is None:
            yield f"{path} is missing, and {MANIFEST_FILE} lists it; run sm-train fetch-model again"
        elif size != expected.bytes:
            yield f"{path} has {size:,} bytes of {expected.bytes:,}; run sm-train fetch-model again"
        elif size <= _SMALL_BYTES and _sha256(reader.read(path, 0, size)) != expected.sha256:
            yield _changed(path)


def require_digests(folder: Path, manifest: ModelManifest) -> None:
    """Digest every file, large ones too, in several threads.

    Raises:
        ComponentFileError: a file differs.
    """
    with ThreadPoolExecutor(_THREADS) as pool:
        digests = pool.map(lambda path: file_sha256(folder / path), manifest.files)
        for (path, expected), digest in zip(manifest.files.items(), digests, strict=True):
            if digest != expected.sha256:
                raise ComponentFileError(_changed(path))


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _changed(path: str) -> str:
    return (
        f"{path}: the digest does not match {MANIFEST_FILE}, so the file has changed since it was "
        "copied; run sm-train fetch-model again"
    )


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()
