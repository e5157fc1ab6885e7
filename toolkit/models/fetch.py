"""Copies a model from the Hub to a folder or to S3: what training needs, with digests.

Only safetensors are copied, of one precision, from one commit. Files arrive in a staging folder,
where an interrupted download continues. Each is compared with the Hub's digest.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sm_train.entrypoints.base.sagemaker_paths import stays_below
from sm_train.entrypoints.models.component_files import (
    MANIFEST_FILE,
    VARIANT,
    ComponentFileError,
    FileDigest,
    LocalComponents,
    ModelManifest,
    file_sha256,
    has_component,
    read_json,
    read_manifest,
    weight_files,
)
from sm_train.entrypoints.storage.store import ObjectStore
from sm_train.toolkit.aws.aws_errors import translate_aws_errors
from sm_train.toolkit.aws.s3 import split_uri
from sm_train.toolkit.base.errors import ExitCode, UserError
from sm_train.toolkit.models.hub.hub_repository import HubComponents
from sm_train.toolkit.terminal.interrupts import set_complete

if TYPE_CHECKING:
    pass

Progress = Callable[[int], None]

_WEIGHTS = ("unet", "transformer", "vae", "text_encoder", "text_encoder_2", "text_encoder_3")
_OTHERS = ("scheduler", "tokenizer", "tokenizer_2", "tokenizer_3")
_TEXT_SUFFIXES = (".json", ".txt", ".model")
"""Suffixes of configurations and vocabularies."""

_BLOCK_BYTES = 32 * 2**20
"""Bytes of a request: an interrupted download repeats at most this much of each file."""
_PARALLEL = 8
_SHA256_KEY = "sha256"
"""Key of an object's metadata with the digest of its content."""


@dataclass(frozen=True)
class FetchPlan:
    """The files to copy, with sizes; ``variant`` is the one that some weights are of, or None."""

    source: HubComponents
    files: dict[str, int]
    variant: str | None

    @property
    def bytes(self) -> int:
        return sum(self.files.values())


def plan_fetch(source: HubComponents, *, fp16: bool) -> FetchPlan:
    """Choose the files; ``fp16`` prefers the half-precision variant where there is one.

    Raises:
        UserError: the repository is no diffusers model, or lacks safetensors.
    """
    if "model_index.json" not in source.files:
        raise UserError(
            f"{source.location}: has no model_index.json, so it is no model in diffusers' layout; "
            "name a repository of one"
        )
    names, variants = {"model_index.json"}, set()
    try:
        listed = read_json(source, "model_index.json")
        for component in (*_WEIGHTS, *_OTHERS):
            if component not in listed or not has_component(source, component):
                continue
            names |= set(_texts(source, component))
            if component in _WEIGHTS:
                weights = weight_files(source, component, prefer=VARIANT if fp16 else None)
                names |= {*weights.paths, *([weights.index] if weights.index else [])}
                variants.add(weights.variant)
    except ComponentFileError as error:
        raise UserError(f"{source.location}: {error}", ExitCode.PREFLIGHT) from None
    names |= {path for path in source.files if path.upper().startswith("LICENSE")}
    if outside := [name for name in names if not stays_below(name)]:
        raise UserError(
            f"{source.location}: the file {outside[0]!r} leads out of its folder",
            ExitCode.PREFLIGHT,
        )
    files = {name: source.files[name] for name in sorted(names)}
    return FetchPlan(source, files, VARIANT if VARIANT in variants else None)


def _texts(source: HubComponents, component: str) -> Iterator[str]:
    """Yield a component's configurations and vocabularies, without indexes of weights."""
    for path in source.files:
        name = path.removeprefix(f"{component}/")
        is_own = path.startswith(f"{component}/") and "/" not in name
        if is_own and name.endswith(_TEXT_SUFFIXES) and ".index." not in name:
            yield path


def staging_folder(source: HubComponents) -> Path:
    """Return the folder in the user's cache for downloads of this commit on the way to S3."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = f"{source.repository.replace('/', '--')}@{source.revision}"
    return cache / "sm-train" / "fetch" / name


def is_copy(plan: FetchPlan, folder: Path) -> bool:
    """Return whether ``folder`` is a complete copy of the plan's commit, by its manifest and sizes.

    An interrupt may arrive after the copy is complete; the same command then has nothing to do.
    """
    reader = LocalComponents(folder)
    try:
        manifest = read_manifest(reader) if folder.is_dir() else None
    except ComponentFileError:
        return False
    if manifest is None or manifest.revision != plan.source.revision:
        return False
    sizes = {path: entry.bytes for path, entry in manifest.files.items()}
    return sizes == plan.files == {path: reader.files.get(path) for path in plan.files}


def fetch_to_folder(plan: FetchPlan, folder: Path, progress: Progress) -> ModelManifest:
    """Copy the files to ``folder``, which must not exist; it appears when it is complete.

    Raises:
        UserError: the Hub fails, or a file is not what it announces.
    """
    staging = folder.parent / f".{folder.name}.{plan.source.revision[:12]}.fetch"
    with ThreadPoolExecutor(_PARALLEL) as pool:
        digests = pool.map(lambda path: _fetch(plan.source, path, staging, progress), plan.files)
        manifest = _manifest(plan, dict(zip(plan.files, digests, strict=True)))
    (staging / MANIFEST_FILE).write_text(manifest.to_json(), encoding="utf-8")
    set_complete(True)
    staging.rename(folder)
    return manifest


def fetch_to_s3(
    plan: FetchPlan, store: ObjectStore, uri: str, staging: Path, progress: Progress
) -> ModelManifest:
    """Copy the files below ``uri``, one after the other through ``staging``; the manifest is last.

    What an earlier attempt uploaded is not copied again.

    Raises:
        UserError: the Hub or AWS fails, or a file is not what the Hub announces.
    """
    bucket, prefix = split_uri(uri.rstrip("/") + "/")
    digests = {}
    for path, size in plan.files.items():
        with translate_aws_errors(f"{uri}: {path}"):
            stored = _stored_digest(store, bucket, f"{prefix}{path}", size)
        expected = plan.source.digests.get(path)
        if stored is not None and expected in (None, stored):
            digests[path] = stored
            progress(size)
            continue
        digests[path] = _fetch(plan.source, path, staging, progress)
        with translate_aws_errors(f"{uri}: {path}"):
            metadata = {_SHA256_KEY: digests[path]}
            store.upload(staging / path, bucket, f"{prefix}{path}", metadata=metadata)
        (staging / path).unlink()
    manifest = _manifest(plan, digests)
    with translate_aws_errors(f"{uri}: {MANIFEST_FILE}"):
        body = manifest.to_json().encode()
        store.put(bucket, f"{prefix}{MANIFEST_FILE}", body)
    shutil.rmtree(staging, ignore_errors=True)
    return manifest


def _stored_digest(store: ObjectStore, bucket: str, key: str, size: int) -> str | None:
    """Return the digest that an object was uploaded with; None if there is none of this size."""
    head = store.head(bucket, key)
    return None if head is None or head.bytes != size else head.metadata.get(_SHA256_KEY)


def _manifest(plan: FetchPlan, digests: dict[str, str]) -> ModelManifest:
    files = {path: FileDigest(size, digests[path]) for path, size in plan.files.items()}
    return ModelManifest(plan.source.repository, plan.source.revision, files)


def _fetch(source: HubComponents, path: str, folder: Path, progress: Progress) -> str:
    """Download a file, continuing an earlier attempt; return its SHA-256.

    Raises:
        UserError: the Hub fails, or the content is not what it announces.
    """
    size, target = source.files[path], folder / path
    target.parent.mkdir(parents=True, exist_ok=True)
    if not (target.exists() and target.stat().st_size == size):
        partial = target.with_name(f"{target.name}.part")
        done = partial.stat().st_size if partial.exists() else 0
        progress(done)
        with partial.open("ab") as file:
            while done < size:
                block = source.read(path, done, _BLOCK_BYTES)
                file.write(block)
                file.flush()
                done += len(block)
                progress(len(block))
        partial.replace(target)
    else:
        progress(size)
    digest = file_sha256(target)
    expected = source.digests.get(path)
    if expected is not None and digest != expected:
        target.unlink()
        raise UserError(
            f"{source.location}: {path}: the downloaded content does not have the Hub's digest; "
            "run the same command again",
            ExitCode.UNEXPECTED,
        )
    return digest


def describe(plan: FetchPlan) -> list[tuple[str, int]]:
    """Return the folders to copy with their bytes, in the order of the plan."""
    sizes: dict[str, int] = {}
    for path, size in plan.files.items():
        folder = path.rpartition("/")[0] or "."
        sizes[folder] = sizes.get(folder, 0) + size
    return list(sizes.items())
