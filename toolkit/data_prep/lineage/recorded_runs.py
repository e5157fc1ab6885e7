"""Finds the records of what runs have trained on, on this machine and in S3."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from sm_train.entrypoints.base.stored_fields import mapping_of, text
from sm_train.entrypoints.job_interface.checkpoint_layout import (
    FINAL_MODEL,
    MARKER,
    SETTINGS_FILE,
    checkpoint_folders,
    complete_marker,
    parse_step_folder,
)
from sm_train.entrypoints.lineage.data_record import (
    FOLDER,
    RecordError,
    decode_record,
    decode_shards,
)
from sm_train.entrypoints.lineage.replacements import SUFFIX, decode_replacements
from sm_train.entrypoints.storage.store import ObjectStore, S3Access, open_store
from sm_train.toolkit.base.errors import UserError
from sm_train.toolkit.data_prep.lineage.seen_steps import Attempt


@dataclass(frozen=True, eq=False)
class RecordedStage:
    """A stage of a run: its attempts, oldest first, and where its checkpoints are.

    ``checkpoints`` are the steps of those that are complete now; ``final`` is whether its final
    model exists. ``components`` are the identities of the frozen components that it was trained
    with, by name; empty if they are not known.
    """

    run: str
    stage: str
    location: str
    attempts: tuple[Attempt, ...]
    checkpoints: tuple[int, ...]
    final: bool
    components: Mapping[str, str] = field(default_factory=dict)

    @property
    def until(self) -> int:
        """The last step that is known to have counted."""
        replacements = self.attempts[-1].replacements
        recorded = 0 if replacements is None else replacements.step
        return max([recorded, *self.checkpoints])


class _Stages(Protocol):
    """The checkpoint folders of stages in one place."""

    def locations(self) -> Iterator[str]: ...
    def names(self, location: str, folder: str) -> list[str]: ...
    def read(self, location: str, name: str) -> bytes: ...
    def sizes(self, location: str) -> Mapping[str, int]: ...


def recorded_stages(place: str, access: S3Access) -> Iterator[RecordedStage]:
    """Yield all stages with records in ``place``.

    That is a folder of local runs or one of them, or a bucket with runs, ``s3://BUCKET`` or
    ``s3://BUCKET/RUN``.

    Raises:
        UserError: it does not exist, or a record is damaged.
    """
    stages: _Stages
    if place.startswith("s3://"):
        bucket, _, run = place.removeprefix("s3://").rstrip("/").partition("/")
        stages = _InBucket(open_store(access), bucket, run)
    else:
        if not Path(place).is_dir():
            raise UserError(f"--runs: {place}: no such folder of runs")
        stages = _OnDisk(Path(place))
    for location in stages.locations():
        attempts = tuple(_attempts(stages, location))
        if attempts:
            yield _stage(stages, location, attempts)


def _attempts(stages: _Stages, location: str) -> Iterator[Attempt]:
    names = frozenset(stages.names(location, FOLDER))
    for name in sorted(names):
        if not name.endswith(".json"):
            continue
        try:
            record = decode_record(stages.read(location, f"{FOLDER}/{name}"), f"{location}/{name}")
            content = stages.read(location, f"{FOLDER}/{record.shards}")
            shards = decode_shards(content, [channel.channel for channel in record.channels])
            replaced, replacements = name.removesuffix(".json") + SUFFIX, None
            if replaced in names:
                content = stages.read(location, f"{FOLDER}/{replaced}")
                replacements = decode_replacements(content, f"{location}/{replaced}")
            yield Attempt(record, shards, replacements)
        except RecordError as error:
            raise UserError(str(error)) from None


def _stage(stages: _Stages, location: str, attempts: tuple[Attempt, ...]) -> RecordedStage:
    sizes = stages.sizes(location)
    complete = {
        step: name
        for name in checkpoint_folders(sizes)
        if (step := parse_step_folder(name)) is not None
        and complete_marker(name, sizes, lambda name: stages.read(location, f"{name}/{MARKER}"))[0]
    }
    newest = complete[max(complete)] if complete else FINAL_MODEL
    record = attempts[0].record
    return RecordedStage(
        record.run,
        record.stage,
        location,
        attempts,
        tuple(sorted(complete)),
        any(name.startswith(f"{FINAL_MODEL}/") for name in sizes),
        _components(stages, location, newest, sizes),
    )


def _components(
    stages: _Stages, location: str, folder: str, sizes: Mapping[str, int]
) -> dict[str, str]:
    """Return the identities of the frozen components that a checkpoint was trained with."""
    name = f"{folder}/{SETTINGS_FILE}"
    if name not in sizes:
        return {}
    try:
        found = json.loads(stages.read(location, name)).get("components", {})
        return mapping_of(text)(found)
    except (ValueError, AttributeError):
        return {}  # a damaged file: nothing is known


@dataclass(frozen=True)
class _OnDisk:
    place: Path

    def locations(self) -> Iterator[str]:
        depths = (f"{'*/' * depth}checkpoints/{FOLDER}" for depth in range(3))
        found = (path for pattern in depths for path in self.place.glob(pattern))
        yield from sorted(str(path.parent) for path in found)

    def names(self, location: str, folder: str) -> list[str]:
        return [path.name for path in (Path(location) / folder).iterdir()]

    def read(self, location: str, name: str) -> bytes:
        return (Path(location) / name).read_bytes()

    def sizes(self, location: str) -> dict[str, int]:
        top = Path(location)
        return {
            path.relative_to(top).as_posix(): path.stat().st_size
            for path in top.rglob("*")
            if path.is_file()
        }


@dataclass(frozen=True)
class _InBucket:
    store: ObjectStore
    bucket: str
    run: str

    def locations(self) -> Iterator[str]:
        runs = [f"{self.run}/"] if self.run else self.store.folders(self.bucket, "")
        for run in runs:
            for stage in self.store.folders(self.bucket, f"{run}checkpoints/"):
                yield f"s3://{self.bucket}/{stage.rstrip('/')}"

    def names(self, location: str, folder: str) -> list[str]:
        prefix = f"{self._key(location)}/{folder}/"
        return [found.key.removeprefix(prefix) for found in self.store.objects(self.bucket, prefix)]

    def read(self, location: str, name: str) -> bytes:
        return self.store.read(self.bucket, f"{self._key(location)}/{name}")

    def sizes(self, location: str) -> dict[str, int]:
        prefix = f"{self._key(location)}/"
        objects = self.store.objects(self.bucket, prefix)
        return {found.key.removeprefix(prefix): found.bytes for found in objects}

    def _key(self, location: str) -> str:
        return location.removeprefix(f"s3://{self.bucket}/")


def stages_in(places: Sequence[str], access: S3Access) -> list[RecordedStage]:
    """Return the stages with records in all of ``places``, oldest first."""
    found = [stage for place in places for stage in recorded_stages(place, access)]
    return sorted(found, key=lambda stage: stage.attempts[0].record.started)
