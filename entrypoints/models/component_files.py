"""Read components of a model folder without downloading their weights.

A reader lists a folder's files with sizes and reads ranges of them: on disk here; in S3 and on the
Hub in the toolkit. Headers of safetensors files hold names, shapes and sizes of all tensors.

The manifest of a copied model names its origin and the digest of each file.
``sm-train fetch-model`` writes it next to ``model_index.json``; ``sm-train check`` and the training
job compare the files with it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from itertools import count, takewhile
from pathlib import Path
from typing import Any, Protocol

from sm_train.entrypoints.checkpoints.safetensors_header import (
    Header,
    HeaderError,
    ReadRange,
    TensorEntry,
    parse_header,
)
from sm_train.entrypoints.records.upload_notes import UPLOAD_NOTES

VARIANT = "fp16"
"""The variant of published weights that is used if there are no others."""

PICKLES = (".bin", ".ckpt", ".pt", ".pth")
"""Suffixes of weights that run code when they are loaded."""


def numbered_component(name: str, index: int) -> str:
    """Return the folder of a text encoder or tokenizer: ``name``, ``name_2``, ``name_3``."""
    return name if index == 0 else f"{name}_{index + 1}"


class ComponentReader(Protocol):
    """A model folder: ``location`` is its name for the user, ``files`` path → size in bytes."""

    @property
    def location(self) -> str: ...

    @property
    def files(self) -> Mapping[str, int]: ...

    def read(self, path: str, start: int, length: int) -> bytes:
        """Return up to ``length`` bytes of a file from ``start`` on."""
        ...


class ComponentFileError(ValueError):
    """A file of a component cannot be used; the message is one line with the fix."""


@dataclass(frozen=True)
class LocalComponents:
    """A model folder on this machine."""

    folder: Path

    @property
    def location(self) -> str:
        return str(self.folder)

    @cached_property
    def files(self) -> dict[str, int]:
        return {
            path.relative_to(self.folder).as_posix(): path.stat().st_size
            for path in sorted(self.folder.rglob("*"))
            if path.is_file() and not path.match(UPLOAD_NOTES)
        }

    def read(self, path: str, start: int, length: int) -> bytes:
        with (self.folder / path).open("rb") as file:
            file.seek(start)
            return file.read(length)


def read_json(reader: ComponentReader, path: str) -> dict[str, Any]:
    """Return a JSON object of the folder.

    Raises:
        ComponentFileError: it is missing or damaged.
    """
    if path not in reader.files:
        raise ComponentFileError(f"{path} is missing; copy the model again")
    try:
        document = json.loads(reader.read(path, 0, reader.files[path]))
    except (ValueError, RecursionError):
        raise ComponentFileError(f"{path} is not JSON; copy the model again") from None
    if not isinstance(document, dict):
        raise ComponentFileError(f"{path} is not a JSON object; copy the model again")
    return document


def read_header(reader: ComponentReader, path: str) -> Header:
    """Return the header of a safetensors file of the folder.

    Raises:
        ComponentFileError: it is damaged, or the file is shorter than it says.
    """
    return _parsed(partial(reader.read, path), reader.files[path], path)


def read_file_header(path: Path) -> Header:
    """Return the header of a safetensors file on this machine.

    Raises:
        ComponentFileError: as in :func:`read_header`.
    """
    reader = LocalComponents(path.parent)
    return _parsed(partial(reader.read, path.name), path.stat().st_size, str(path))


def _parsed(read: ReadRange, size: int, path: str) -> Header:
    try:
        return parse_header(read, size, path)
    except HeaderError as error:
        raise ComponentFileError(str(error)) from None


def has_component(reader: ComponentReader, name: str) -> bool:
    """Return whether the folder has files of a component."""
    return any(path.startswith(f"{name}/") for path in reader.files)


@dataclass(frozen=True)
class WeightFiles:
    """The safetensors files of a component, and the index that lists them if they are several.

    ``variant`` is None or :data:`VARIANT`.
    """

    paths: tuple[str, ...]
    variant: str | None
    index: str | None = None


def weight_files(
    reader: ComponentReader, component: str, *, prefer: str | None = None
) -> WeightFiles:
    """Return the weights of a component: of the variant ``prefer``, or else of the other one.

    By default they are in full precision, or else of the fp16 variant.

    Raises:
        ComponentFileError: there are none, only pickles, or an index lists a missing file.
    """
    for variant in (VARIANT, None) if prefer == VARIANT else (None, VARIANT):
        if found := _of_variant(reader, component, variant):
            return found
    pickles = [
        path for path in reader.files if path.startswith(f"{component}/") and path.endswith(PICKLES)
    ]
    if pickles:
        raise ComponentFileError(
            f"{pickles[0]}: only pickled weights, which can run code when they are loaded; use a "
            "revision with safetensors, or convert it with save_pretrained(safe_serialization=True)"
        )
    raise ComponentFileError(f"{component}: has no safetensors weights; copy the model again")


def _of_variant(reader: ComponentReader, component: str, variant: str | None) -> WeightFiles | None:
    """Return the files of one variant, named as diffusers and Transformers do; None without any."""
    stems = "diffusion_pytorch_model|model"
    infix = rf"\.{variant}" if variant else ""
    single = re.compile(rf"{re.escape(component)}/(?:{stems}){infix}\.safetensors")
    # Both orders of variant and "index" have been written.
    index = re.compile(
        rf"{re.escape(component)}/(?:{stems})(?:{infix}\.safetensors\.index"
        rf"|\.safetensors\.index{infix})\.json"
    )
    if found := [path for path in reader.files if index.fullmatch(path)]:
        return WeightFiles(tuple(_indexed(reader, component, found[0])), variant, found[0])
    paths = tuple(path for path in reader.files if single.fullmatch(path))
    return WeightFiles(paths, variant) if paths else None


def _indexed(reader: ComponentReader, component: str, index: str) -> Iterator[str]:
    """Yield the files that an index lists.

    Raises:
        ComponentFileError: one is missing.
    """
    weight_map = read_json(reader, index).get("weight_map")
    names = weight_map.values() if isinstance(weight_map, dict) else ()
    if not names or not all(isinstance(name, str) for name in names):
        raise ComponentFileError(f"{index} lists no weights; copy the model again")
    for name in sorted(set(names)):
        path = f"{component}/{name}"
        if path not in reader.files:
            raise ComponentFileError(f"{path} is missing, and {index} lists it; copy it again")
        yield path


def read_shapes(reader: ComponentReader, component: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all of a component's tensors.

    Raises:
        ComponentFileError: a file is missing or damaged, or lacks a tensor that an index lists.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for path in weight_files(reader, component).paths:
        shapes |= {name: entry.shape for name, entry in read_header(reader, path).tensors.items()}
    return shapes


_BLOCKS, _BLOCK_BYTES = 16, 4096
"""Blocks of each tensor that its identity samples, spread evenly from its start to its end."""

_RENAMED = (
    # Transformers 5 saves a CLIPTextModel without the prefix that version 4 saves.
    (re.compile(r"^text_model\."), ""),
    # Before diffusers 0.18, attention of an autoencoder had other names.
    (re.compile(r"\.query\."), ".to_q."),
    (re.compile(r"\.key\."), ".to_k."),
    (re.compile(r"\.value\."), ".to_v."),
    (re.compile(r"\.proj_attn\."), ".to_out.0."),
    # A T5's tied embeddings, of which one or all are saved.
    (re.compile(r"^(?:encoder|decoder)\.embed_tokens\."), "shared."),
)
"""Names that a library changes when it saves a model again."""

_DERIVED = re.compile(r"(?:^|\.)position_ids$")
"""Tensors that some versions of a library save and others compute."""


def tensors_identity(reader: ComponentReader, component: str) -> str:
    """Return a digest of what a component's tensors hold: sorted names, types, shapes and bytes.

    Blocks of each tensor are sampled, which takes no time. The digest distinguishes a model from
    one whose weights were trained further, unless only a few rows of a large tensor were. Saving
    the model again, dividing it into other files and renaming files does not change it.

    Raises:
        ComponentFileError: a file is missing or damaged.
    """
    places: dict[str, tuple[str, int, TensorEntry]] = {}
    for path in weight_files(reader, component).paths:
        header = read_header(reader, path)
        data = 8 + len(header.text)
        for name, entry in header.tensors.items():
            if not _DERIVED.search(name):
                places.setdefault(_current_name(name), (path, data + entry.start, entry))
    digest = hashlib.sha256()
    for name, (path, start, entry) in sorted(places.items()):
        digest.update(json.dumps([name, entry.dtype, entry.shape]).encode())
        for position, length in _sampled_blocks(entry.end - entry.start):
            digest.update(reader.read(path, start + position, length))
    return digest.hexdigest()[:16]


def _current_name(name: str) -> str:
    for pattern, replacement in _RENAMED:
        name = pattern.sub(replacement, name)
    return name


def _sampled_blocks(size: int) -> Iterator[tuple[int, int]]:
    """Yield position and length of the blocks that are sampled of ``size`` bytes."""
    if size <= _BLOCKS * _BLOCK_BYTES:
        yield 0, size
        return
    for number in range(_BLOCKS):
        yield number * (size - _BLOCK_BYTES) // (_BLOCKS - 1), _BLOCK_BYTES


def describe_identity(identity: str | None) -> str:
    """Return an identity for messages and model cards."""
    return "none" if identity is None else f"{identity} (sampled)"


def frozen_identities(reader: ComponentReader) -> dict[str, str]:
    """Return the identities of the autoencoder and the text encoders of a model folder, by name.

    These are the components that a job loads; a folder may hold others.

    Raises:
        ComponentFileError: a file is missing or damaged.
    """
    numbered = map(partial(numbered_component, "text_encoder"), count())
    encoders = takewhile(partial(has_component, reader), numbered)
    names = [*encoders, *(["vae"] if has_component(reader, "vae") else [])]
    return {name: tensors_identity(reader, name) for name in names}


def identity_differences(stored: Any, current: Mapping[str, str]) -> list[str]:
    """Return a description of each component whose identity differs, with both values."""
    before = stored if isinstance(stored, Mapping) else {}
    return [
        f"{name} {describe_identity(before.get(name))} → {describe_identity(current.get(name))}"
        for name in sorted({*before, *current})
        if before.get(name) != current.get(name)
    ]


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
