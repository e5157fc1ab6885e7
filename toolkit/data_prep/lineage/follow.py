"""Follows samples of a set of shards to the runs, steps and checkpoints that have seen them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from sm_train.entrypoints.shards.removal_list import RemovalList
from sm_train.toolkit.data_prep.lineage.recorded_runs import RecordedStage
from sm_train.toolkit.data_prep.lineage.recorded_shards import RecordedIndexes
from sm_train.toolkit.data_prep.lineage.seen_steps import Place, SeenSteps, seen_steps
from sm_train.toolkit.data_prep.packing.shard_set import ShardSet
from sm_train.toolkit.data_prep.removal.find_samples import (
    FoundSample,
    find_by_name,
    find_samples,
    packed_sources,
    require_found,
)


@dataclass(frozen=True)
class SampleStory:
    """A sample: the shards that have or had it, when it was removed, and who has seen it.

    ``shards`` are (name, number in it, whether the shard has been replaced).
    """

    key: str
    source: str | None
    removed: str | None
    shards: tuple[tuple[str, int, bool], ...]
    seen: tuple[tuple[RecordedStage, SeenSteps], ...]


def follow(
    shards: ShardSet, names: Sequence[str], where: str | None, stages: Sequence[RecordedStage]
) -> list[SampleStory]:
    """Return the stories of the samples with these keys or images, or that fulfil ``where``.

    Raises:
        UserError: there is no index, one of the names is no sample, or the condition is invalid.
    """
    removals = shards.read_list()
    present, replaced = _find(shards, names, where, removals)
    removed = dict(
        zip(
            removals.samples["key"].to_pylist(),
            removals.samples["removed"].to_pylist(),
            strict=True,
        )
    )
    stories = []
    with RecordedIndexes(shards.access) as indexes:
        for key in dict.fromkeys(sample.key for sample in (*present, *replaced)):
            places = [(sample, False) for sample in present if sample.key == key]
            places += [(sample, True) for sample in replaced if sample.key == key]
            source = next((sample.source for sample, _ in places if sample.source), None)
            seen = _seen(
                shards, [sample for sample, _ in places], stages, removed.get(key), indexes
            )
            stories.append(
                SampleStory(
                    key,
                    source,
                    removed.get(key),
                    tuple((sample.shard, sample.number, old) for sample, old in places),
                    tuple(seen),
                )
            )
    return stories


def _find(
    shards: ShardSet, names: Sequence[str], where: str | None, removals: RemovalList
) -> tuple[list[FoundSample], list[FoundSample]]:
    """Return the samples in present shards, and in those that were replaced."""
    with shards.open_index() as (index, _), shards.open_replaced() as earlier:
        sources = packed_sources(shards, index)
        if where is not None:
            present = find_samples(shards, index, (), where, RemovalList())
            names = [sample.key for sample in present]
        else:
            # A removed image may be known by its name in the list alone.
            listed = removals.samples.select(["key", "source"]).to_pylist()
            names = [*names, *(row["key"] for row in listed if row["source"] in set(names))]
            present = find_by_name(index, names, sources)
        replaced = [] if earlier is None else find_by_name(earlier, names, sources)
        if where is None:
            require_found(names, (*present, *replaced), shards.address)
        return present, replaced


def _seen(
    shards: ShardSet,
    samples: Iterable[FoundSample],
    stages: Iterable[RecordedStage],
    removed: str | None,
    indexes: RecordedIndexes,
) -> Iterator[tuple[RecordedStage, SeenSteps]]:
    """Yield the stages that have trained on the shards, with the steps that saw the sample."""
    places = list(samples)
    for stage in stages:
        steps: set[int] = set()
        reason = None
        channels = reads(stage, shards)
        for channel in channels:
            attempts = [attempt for attempt in stage.attempts if channel in attempt.shards]
            for sample in places:
                place = Place(channel, sample.shard, sample.number)
                found = seen_steps(attempts, place, stage.until, removed, indexes.shards_of)
                steps |= {*found.steps}
                reason = reason or found.reason
        if channels:
            yield stage, SeenSteps(tuple(sorted(steps)), stage.until, reason)


def reads(stage: RecordedStage, shards: ShardSet) -> set[str]:
    """Return the channels of a stage that read a set of shards."""
    location = normal_address(shards.storage.address(shards.index_file))
    return {
        channel.channel
        for attempt in stage.attempts
        for channel in attempt.record.channels
        if channel.index is not None and normal_address(channel.index) == location
    }


def normal_address(address: str) -> str:
    """Return an address in the form that is compared: paths are absolute."""
    return address if address.startswith("s3://") else str(Path(address).resolve())
