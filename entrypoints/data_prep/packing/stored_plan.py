"""Plans of packs, which are stored in the destination: all that a node needs to build shards.

A finished pack keeps its inputs there, so that another pack can extend it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray
from sm_train.entrypoints.base.stored_fields import (
    amount,
    anything,
    flag,
    list_of,
    mapping_of,
    one_of,
    optional,
    positive,
    positive_size,
    record_of,
    size,
    text,
)
from sm_train.entrypoints.data_prep.packing.plan import PackOptions, ShardPlan, shard_name
from sm_train.entrypoints.data_prep.packing.plan_files import (
    HEADER_FILE,
    INPUTS,
    REBUILD,
    REJECTED,
    STREAMED,
    PlanFiles,
    PlannedInputs,
    PlannedRejections,
    partition_names,
)
from sm_train.entrypoints.data_prep.work.plan_documents import PlanError, read_checked
from sm_train.entrypoints.data_prep.work.work_stages import PLAN_NAME
from sm_train.entrypoints.data_prep.work.write_threads import write_in_threads
from sm_train.entrypoints.job_interface.job_config import Hdr, IccProfile
from sm_train.entrypoints.sample_metadata.column_types import ColumnType, ColumnTypes
from sm_train.entrypoints.storage.storage import Storage, write_file
from sm_train.entrypoints.storage.store import S3Access

INPUTS_FOLDER = "inputs"
"""Folder in the destination with the plan of each pack, in a folder of its own."""

DIGESTS_FOLDER = "digests"
"""Folder in that of a plan with the digests of all inputs, if the pack drops duplicates."""

_STREAMED_PREFIX = "streamed-"

_OPTION_CHECKS = {
    "pixels": flag,
    "min_side": optional(positive),
    "max_aspect": optional(amount),
    "max_side": optional(positive),
    "quality": optional(positive),
    "convert": flag,
    "duplicates": flag,
    "near_bits": optional(size),
    "latents": optional(text),
    "latents_resolution": optional(positive),
    "index_columns": mapping_of(one_of(*get_args(ColumnType))),
    "icc_profile": one_of(*get_args(IccProfile)),
    "hdr": one_of(*get_args(Hdr)),
}
"""The fields of :class:`PackOptions`."""


def option_problems(options: PackOptions, shard_bytes: int) -> Iterator[str]:
    """Yield the options that a plan cannot hold, as a command line names them, and why."""
    named = {"min_side": "min-side", "max_aspect": "max-aspect", "max_side": "max-side"}
    checked = [(named[name], _OPTION_CHECKS[name], getattr(options, name)) for name in named]
    for name, check, value in (*checked, ("shard-size", positive_size, shard_bytes)):
        try:
            check(value)
        except ValueError as error:
            yield f"{name}: {error}"


def _fingerprint(value: Any) -> str:
    """Return what names the folder of a part of a pack; ValueError if it names something else."""
    if not re.fullmatch(rf"({_STREAMED_PREFIX})?[0-9a-f]{{1,64}}", text(value)):
        raise ValueError(f"{value!r} is no digest of inputs")
    return str(value)


_PLAN_FIELDS = {
    "inputs": _fingerprint,
    "extends": list_of(_fingerprint),
    "shard_bytes": positive_size,
    "options": mapping_of(anything),
    "started_ns": size,
    "root": text,
    "pack_options": record_of(_OPTION_CHECKS),
}
_HEADER = {
    "inputs": _fingerprint,
    "root": text,
    "image_bytes": size,
    "rejected": size,
    "shards": list_of(size, min_items=1),
}
_STREAMED_HEADER = {"inputs": _fingerprint, "images": size, "streamed": list_of(size)}

_COPIES = 8
"""Files of a plan that are copied at the same time."""


@dataclass(frozen=True)
class PackPlan:
    """Everything a node needs: the shards to build, and what else the index records.

    The inputs are in files, so its size does not depend on their number. ``fingerprint`` is a
    digest of the inputs, ``image_bytes`` the size of all images, and ``root`` what precedes a
    source in its address. ``rejected`` are inputs that were rejected before any image was read.

    ``packed`` are the shards of the pack that this one extends, and ``extends`` the fingerprints
    of the packs that these come from, in order; both are empty for a new pack.
    """

    plans: tuple[ShardPlan, ...]
    rejected: PlannedRejections
    fingerprint: str
    target_bytes: int
    index_options: dict[str, Any]
    image_bytes: int
    root: str
    packed: tuple[ShardPlan, ...] = ()
    extends: tuple[str, ...] = ()

    @property
    def index_columns(self) -> ColumnTypes:
        """The columns of samples in the index."""
        return self.plans[0].options.index_columns

    @property
    def images(self) -> int:
        """The number of inputs."""
        return sum(len(plan.inputs) for plan in self.plans)

    @property
    def folder(self) -> str:
        """The folder of its files in the destination."""
        return inputs_folder(self.fingerprint)

    @property
    def partitions(self) -> list[str]:
        """The names of the files with its inputs."""
        return partition_names(INPUTS, self.images) + partition_names(REJECTED, len(self.rejected))

    @property
    def identity(self) -> dict[str, Any]:
        """What identifies the pack: an unfinished one with the same identity is resumed."""
        return {
            "inputs": self.fingerprint,
            "extends": list(self.extends),
            "shard_bytes": self.target_bytes,
            "options": self.index_options,
        }

    def with_model(self, folder: Path) -> PackPlan:
        """Return the same plan with the model for latents in ``folder``."""
        options = replace(self.plans[0].options, latents=str(folder))
        return replace(self, plans=tuple(replace(plan, options=options) for plan in self.plans))


@dataclass(frozen=True)
class PackedInputs:
    """The inputs of a finished pack, in the packs that they were added by.

    ``shards`` are all shards with their inputs, of which only the sources, sizes and captions are
    known. ``rejected`` are those that each pack rejected before it read any image. ``streamed`` are
    images that were packed as they arrived. ``has_sample`` says of each row of ``inputs`` whether
    it is in a shard, bool (num_rows,); None if all are. ``arriving`` are the addresses of images
    that have arrived and are not in the index yet, sorted.
    """

    fingerprints: tuple[str, ...]
    shards: tuple[ShardPlan, ...]
    inputs: tuple[PlannedInputs, ...]
    rejected: tuple[PlannedRejections, ...]
    streamed: tuple[StreamedInputs, ...] = ()
    has_sample: NDArray[np.bool_] | None = None
    arriving: Sequence[str] = ()


@dataclass(frozen=True)
class StreamedInputs:
    """Images that were packed as they arrived, ``count`` rows of ``STREAMED_SCHEMA`` in ``files``.

    ``shards`` are the numbers of their streamed shards.
    """

    files: PlanFiles
    count: int
    shards: frozenset[int]


def inputs_folder(fingerprint: str) -> str:
    """Return the folder in the destination with the plan of the pack with this fingerprint."""
    prefix = _STREAMED_PREFIX if is_streamed_part(fingerprint) else ""
    return f"{INPUTS_FOLDER}/{fingerprint[: len(prefix) + 16]}"


def streamed_fingerprint(digest: str) -> str:
    """Return what names a part of a pack whose images were packed as they arrived."""
    return _STREAMED_PREFIX + digest


def is_streamed_part(fingerprint: str) -> bool:
    """Return whether the images of a part of a pack were packed as they arrived."""
    return fingerprint.startswith(_STREAMED_PREFIX)


def make_plan(
    shards: Iterable[int],
    files: PlanFiles,
    root: str,
    options: PackOptions,
    fingerprint: str,
    packed: Sequence[ShardPlan] = (),
) -> tuple[ShardPlan, ...]:
    """Return the shards with these numbers of inputs; all inputs are in ``files``.

    The shards and the inputs are numbered after those that are ``packed``.
    """
    number, offset = len(packed), sum(len(plan.inputs) for plan in packed)
    plans, first = [], 0
    for count in shards:
        name = shard_name(number)
        digests = f"{inputs_folder(fingerprint)}/{DIGESTS_FOLDER}/{name}.npy"
        inputs = PlannedInputs(files, root, first, count, offset)
        plans.append(ShardPlan(number, name, inputs, options, offset + first, digests))
        first += count
        number += 1
    return tuple(plans)


def store_plan(
    pack: PackPlan, folder: Path, destination: Storage, access: S3Access, started_ns: int
) -> tuple[PackPlan, int]:
    """Store a plan, whose files are in ``folder``, in the destination, unless it is there.

    Return the plan as it is read there, and when the pack was started, Unix nanoseconds.
    """
    started_ns = read_start(destination, started_ns)
    document = pack.identity | {
        "started_ns": started_ns,
        "root": pack.root,
        "pack_options": asdict(pack.plans[0].options),
    }
    write_file(destination, PLAN_NAME, json.dumps(document).encode())
    header = f"{pack.folder}/{HEADER_FILE}"
    if destination.size(header) is None:
        copy_partitions(folder, pack.partitions, destination, pack.folder)
        # The header is the last file: with a header, the inputs are complete.
        write_file(destination, header, _header(pack))
    return read_plan(destination, access), started_ns


def copy_partitions(folder: Path, names: Iterable[str], destination: Storage, target: str) -> None:
    """Copy files of a plan from a local folder to the folder ``target`` of the destination."""

    def copy(name: str) -> None:
        write_file(destination, f"{target}/{name}", (folder / name).read_bytes())

    write_in_threads(copy, names, _COPIES)


def read_start(destination: Storage, default_ns: int) -> int:
    """Return when the unfinished pack in the destination was started, Unix nanoseconds.

    Raises:
        PlanError: its plan is damaged.
    """
    try:
        started_ns: int = _read_document(destination)["started_ns"]
    except FileNotFoundError:
        return default_ns
    return started_ns


def unfinished_inputs(destination: Storage) -> str | None:
    """Return what names the inputs of the unfinished pack in the destination.

    None if there is none, or if its plan is damaged: nobody can finish it then.
    """
    try:
        document = read_checked(destination, PLAN_NAME, {"inputs": _fingerprint}, REBUILD)
    except (FileNotFoundError, PlanError):
        return None
    return str(document["inputs"])


def _read_document(destination: Storage) -> dict[str, Any]:
    return read_checked(destination, PLAN_NAME, _PLAN_FIELDS, REBUILD)


def _header(pack: PackPlan) -> bytes:
    """Return what the folder of a plan says of its inputs.

    It does not depend on where these are, except in S3, whose events name images by their address.
    """
    document = {
        "inputs": pack.fingerprint,
        "root": pack.root if pack.root.startswith("s3://") else "",
        "image_bytes": pack.image_bytes,
        "rejected": len(pack.rejected),
        "shards": [len(plan.inputs) for plan in pack.plans],
    }
    return json.dumps(document).encode()


def _read_header(destination: Storage, fingerprint: str) -> dict[str, Any]:
    name = f"{inputs_folder(fingerprint)}/{HEADER_FILE}"
    checks = _STREAMED_HEADER if is_streamed_part(fingerprint) else _HEADER
    return read_checked(destination, name, checks, REBUILD)


def read_plan(destination: Storage, access: S3Access) -> PackPlan:
    """Return the plan of the unfinished pack in the destination.

    Raises:
        FileNotFoundError: there is none.
        PlanError: it is damaged, or of another version of sm-train.
    """
    document = _read_document(destination)
    fingerprint = document["inputs"]
    header = _read_header(destination, fingerprint)
    files = PlanFiles(destination.address(inputs_folder(fingerprint)), access)
    root, options = document["root"], PackOptions(**document["pack_options"])
    packed = read_packed_inputs(destination, access, document["extends"]).shards
    return PackPlan(
        make_plan(header["shards"], files, root, options, fingerprint, packed),
        PlannedRejections(files, header["rejected"]),
        fingerprint,
        document["shard_bytes"],
        document["options"],
        header["image_bytes"],
        root,
        packed,
        tuple(document["extends"]),
    )


def remove_incomplete_plan(destination: Storage) -> None:
    """Remove a plan that was not stored completely."""
    try:
        fingerprint = _read_document(destination)["inputs"]
    except FileNotFoundError:
        return
    destination.remove_folder(inputs_folder(fingerprint))
    destination.remove(PLAN_NAME)


def read_packed_inputs(
    destination: Storage, access: S3Access, fingerprints: Sequence[str]
) -> PackedInputs:
    """Return the inputs of a finished pack, which was extended by all but the first of these.

    Raises:
        FileNotFoundError: the destination does not have them.
        PlanError: what lists them is damaged, or of another version of sm-train.
    """
    shards: list[ShardPlan] = []
    inputs, rejected, streamed = [], [], []
    for fingerprint in fingerprints:
        header = _read_header(destination, fingerprint)
        files = PlanFiles(destination.address(inputs_folder(fingerprint)), access)
        if is_streamed_part(fingerprint):
            part = StreamedInputs(files, header["images"], frozenset(header["streamed"]))
            streamed.append(part)
            continue
        plans = make_plan(header["shards"], files, "", PackOptions(), fingerprint, shards)
        shards += plans
        inputs.append(PlannedInputs(files, header["root"], 0, sum(header["shards"])))
        rejected.append(PlannedRejections(files, header["rejected"]))
    return PackedInputs(
        tuple(fingerprints), tuple(shards), tuple(inputs), tuple(rejected), tuple(streamed)
    )


def store_streamed(
    destination: Storage, fingerprint: str, folder: Path, images: int, shards: Sequence[int]
) -> None:
    """Store the names of images of a streaming pack, whose files are in ``folder``."""
    target = inputs_folder(fingerprint)
    copy_partitions(folder, partition_names(STREAMED, images), destination, target)
    document = {"inputs": fingerprint, "images": images, "streamed": list(shards)}
    write_file(destination, f"{target}/{HEADER_FILE}", json.dumps(document).encode())


def copy_packed_inputs(
    source: Storage, destination: Storage, access: S3Access, fingerprints: Sequence[str]
) -> None:
    """Copy the inputs of a finished pack, by which images are found; nothing if it lacks them."""
    try:
        packed = read_packed_inputs(source, access, fingerprints)
    except FileNotFoundError:
        return
    names = []
    for files, kinds in _partitions(packed):
        folder = files.location.rpartition("/")[2]
        names += [f"{INPUTS_FOLDER}/{folder}/{name}" for name in (*kinds, HEADER_FILE)]
    for name in names:
        write_file(destination, name, source.read(name))


def _partitions(packed: PackedInputs) -> Iterator[tuple[PlanFiles, list[str]]]:
    """Yield the files of each part of a pack, and the names of its partitions."""
    for inputs, rejected in zip(packed.inputs, packed.rejected, strict=True):
        names = partition_names(INPUTS, len(inputs)) + partition_names(REJECTED, len(rejected))
        yield inputs.files, names
    for streamed in packed.streamed:
        yield streamed.files, partition_names(STREAMED, streamed.count)
