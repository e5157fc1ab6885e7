"""How the shards suit the cluster: who gets none, who gets more, whether they are too small."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sm_train.entrypoints.data.shard_index import ShardIndex
from sm_train.toolkit.checks.finding import Check, Finding
from sm_train.toolkit.packing.shard_listing import ListedShard
from sm_train.toolkit.terminal.formatting import format_usd

FASTFILE_GOOD_BYTES = 150 * 10**6
SMALLEST_BYTES, LARGEST_BYTES = 2 * 10**9, 5 * 10**9

_UNEQUAL_WARNING, _UNEQUAL_INFO = 0.05, 0.005

_DEALT_SOURCE = (
    "SageMaker API reference, S3DataSource: ShardedByS3Key deals about 1/n of the objects (2026-11)"
)
_SIZE_SOURCE = (
    "AWS Machine Learning Blog, How BRIA AI used distributed training in Amazon SageMaker "
    "(2024-07-11)"
)

IDLE_INSTANCES = Check(
    "idle-instances",
    ("error",),
    means="There are fewer shards than a stage has instances. ShardedByS3Key deals whole objects, "
    "so some instances see none.",
    impact="The job stops at its start and says so, when machines have been waited for. A training "
    "that did not would pay for the idle ones as for the others.",
    fix="Pack at least as many shards as the largest stage has instances, better a multiple: "
    "`sm-train pack … --for RUN` does.",
    source=_DEALT_SOURCE,
)
UNEQUAL_INSTANCES = Check(
    "unequal-instances",
    ("warning", "info"),
    means="Some instances are dealt more than others: the number of shards does not divide, or "
    "their sizes differ. All end an epoch together, so the others read samples again meanwhile. "
    "A warning from 5 % on, an info from 0.5 %; less is not mentioned.",
    impact="That share of the stage's training goes into samples that the epoch has seen already. "
    "Which objects SageMaker deals to whom is not documented: the figure is for turns by name.",
    fix="Pack a number of near-equal shards that the instances of every stage divide "
    "(`sm-train pack … --for RUN`).",
    source=_DEALT_SOURCE,
)
SHARED_SHARDS = Check(
    "shared-shards",
    ("info",),
    means="There are fewer shards than GPUs, or than GPUs and their loader threads. The processes "
    "of an instance share its shards out by sample, so none idles.",
    impact="Nothing with sm-train's loader. One that deals whole shards to its workers would leave "
    "most of them without any.",
    fix="None is needed.",
)
FEW_SAMPLES = Check(
    "few-samples",
    ("warning",),
    means="All the shards together hold fewer samples than one step of the stage takes.",
    impact="Every step sees the same images more than once.",
    fix="Lower the batch or the number of instances; look whether these are all the shards.",
)
SMALL_SHARDS = Check(
    "small-shards",
    ("warning", "info"),
    means="Shards are below 2 GB, where BRIA's were 2 to 5 GB. A warning where they are below "
    "FastFile's 150 MB on average although there is data for larger ones.",
    impact="FastFile lists all objects before training begins, and waits for a first byte at each.",
    fix="Pack with a larger `--shard-size`.",
    source=_SIZE_SOURCE + "; SageMaker developer guide, FastFile mode: fewer, larger files, "
    "from about 150 MB (2026-11)",
)
LARGE_SHARDS = Check(
    "large-shards",
    ("info",),
    means="Shards are above 5 GB, where BRIA's were 2 to 5 GB.",
    impact="Fewer objects to deal, so instances come out less equal, and a broken upload begins "
    "again with more.",
    fix="Pack with a smaller `--shard-size`.",
    source=_SIZE_SOURCE,
)


@dataclass(frozen=True, eq=False)
class Shards:
    """What is known of a data set's shards, by name; ``samples`` is None without an index."""

    where: str
    place: str
    bytes: NDArray[np.int64]
    samples: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.bytes)


def of_index(index: ShardIndex, where: str) -> Shards:
    """By an index alone.

    Raises:
        ShardError: the index is damaged.
    """
    order = np.argsort(np.array(index.names, dtype=object), kind="stable")
    return Shards(where, str(index.path), index.bytes[order], index.samples[order])


def of_listing(
    shards: tuple[ListedShard, ...] | list[ListedShard], where: str, place: str
) -> Shards:
    """By names and bytes."""
    return Shards(where, place, np.array([one.bytes for one in shards], np.int64))


def shard_findings(shards: Shards, document: dict[str, Any], workers: int) -> Iterator[Finding]:
    """Against every stage of the document of ``cost --json``; ``workers`` are each GPU's."""
    for index, stage in enumerate(document["stages"]):
        where = f"stages[{index}].instances"
        if len(shards) < stage["instances"]:
            yield _idle(shards, stage, where)
            continue
        yield from _unequal(shards, stage, where)
        yield from _few(shards, stage, index)
    largest = max(document["stages"], key=lambda stage: int(stage["world_size"]))
    if len(shards) >= largest["instances"]:
        yield from _shared(shards, largest, workers)
    yield from _sizes(shards, largest["instances"])


def _idle(shards: Shards, stage: dict[str, Any], where: str) -> Finding:
    instances = stage["instances"]
    idle = instances - len(shards)
    return IDLE_INSTANCES.found(
        "error",
        where,
        f"{len(shards)} shards for {instances} instances leave {idle} of them idle, and billed, "
        f"{_worth(stage, idle / instances)}: the job stops at its start",
        f"pack at least {instances} shards, better a multiple of that",
    )


def _unequal(shards: Shards, stage: dict[str, Any], where: str) -> Iterator[Finding]:
    instances = stage["instances"]
    amounts = shards.bytes if shards.samples is None else shards.samples
    each = np.bincount(np.arange(len(amounts)) % instances, weights=amounts, minlength=instances)
    again = 1 - each.mean() / each.max() if each.max() else 0.0
    if again < _UNEQUAL_INFO:
        return
    uneven = f"do not divide by {instances} instances"
    if len(shards) % instances == 0:
        kind = "bytes" if shards.samples is None else "samples"
        uneven = f"divide by {instances} instances, but their {kind} differ"
    yield UNEQUAL_INSTANCES.found(
        "warning" if again >= _UNEQUAL_WARNING else "info",
        where,
        f"{len(shards)} shards {uneven}: {again:.1%} of {stage['name']} reads samples again, "
        f"{_worth(stage, again)}",
        f"pack a multiple of {instances} near-equal shards",
    )


def _worth(stage: dict[str, Any], share: float) -> str:
    """The dollars of a share of the machines' time, by the day where the time is not known."""
    if stage["breakdown_usd"].get("training"):
        return f"{format_usd(share * stage['breakdown_usd']['training'])} of its training"
    if stage["cluster_per_day_usd"]:
        return f"{format_usd(share * stage['cluster_per_day_usd'])} a day"
    return "at an unknown price"


def _shared(shards: Shards, stage: dict[str, Any], workers: int) -> Iterator[Finding]:
    gpus = stage["world_size"]
    if len(shards) < gpus * max(1, workers):
        yield SHARED_SHARDS.found(
            "info",
            shards.where,
            f"{len(shards)} shards for the {gpus} GPUs × {workers} workers of {stage['name']}: "
            "they share shards out by sample, and none idles",
            "none is needed",
        )


def _few(shards: Shards, stage: dict[str, Any], index: int) -> Iterator[Finding]:
    if shards.samples is None or not stage["effective_batch_size"]:
        return
    samples = int(shards.samples.sum())
    if samples < stage["effective_batch_size"]:
        yield FEW_SAMPLES.found(
            "warning",
            f"stages[{index}].per_device_batch_size",
            f"a step takes {stage['effective_batch_size']:,} samples and {shards.place} has "
            f"{samples:,}",
            "lower the batch, or look whether these are all the shards",
        )


def _sizes(shards: Shards, instances: int) -> Iterator[Finding]:
    total = int(shards.bytes.sum())
    small = int((shards.bytes < SMALLEST_BYTES).sum())
    # The last shard of a set is what was left over.
    if small > 1 or small == len(shards):
        mean = total / len(shards)
        mendable = mean < FASTFILE_GOOD_BYTES and total >= instances * FASTFILE_GOOD_BYTES
        yield SMALL_SHARDS.found(
            "warning" if mendable else "info",
            shards.where,
            f"{small} of {len(shards)} shards are below 2 GB ({mean / 1e6:,.0f} MB on average); "
            "FastFile suits few large files",
            "pack with a larger --shard-size"
            if total >= instances * SMALLEST_BYTES or mendable
            else "pack larger ones when there is more data",
        )
    if large := int((shards.bytes > LARGEST_BYTES).sum()):
        yield LARGE_SHARDS.found(
            "info",
            shards.where,
            f"{large} of {len(shards)} shards are above 5 GB",
            "pack with a smaller --shard-size",
        )
