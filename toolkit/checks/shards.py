"""Checks how the shards are distributed over the cluster, and their sizes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sm_train.cost.stage import CostStage
from sm_train.entrypoints.sample_metadata.color_counts import (
    ColorCounts,
    latents_problem,
    recorded_color,
)
from sm_train.entrypoints.shards.shard_format import ListedShard
from sm_train.entrypoints.shards.shard_index import IndexHeader, ShardIndex
from sm_train.estimators.config.schema import RunConfig
from sm_train.toolkit.checks.finding import Check, Finding
from sm_train.toolkit.planning.scope import unusual_epochs
from sm_train.toolkit.run_file.index_facts import Expiries, latents_of
from sm_train.toolkit.terminal.formatting import format_duration, format_usd

FASTFILE_GOOD_BYTES = 150 * 10**6
SMALLEST_BYTES, LARGEST_BYTES = 2 * 10**9, 5 * 10**9

_UNEQUAL_WARNING, _UNEQUAL_INFO = 0.05, 0.005

_SCAN_SECONDS = 0.0078
"""Time in which a process reads the headers of a sample, at 30 ms for each request."""

_LONG_SCAN_SECONDS = 60.0


IDLE_INSTANCES = Check("idle-instances", ("error",))
UNEQUAL_INSTANCES = Check("unequal-instances", ("warning", "info"))
SHARED_SHARDS = Check("shared-shards", ("info",))
ORDER_DEPENDS_ON_RANKS = Check("order-depends-on-ranks", ("info",))
START_WITHOUT_INDEX = Check("start-without-index", ("warning", "info"))
FEW_SAMPLES = Check("few-samples", ("warning",))
EPOCHS = Check("epochs", ("error", "warning"))
EXPIRING_SAMPLES = Check("expiring-samples", ("warning",))
SMALL_SHARDS = Check("small-shards", ("warning", "info"))
LARGE_SHARDS = Check("large-shards", ("info",))


AUGMENTED_LATENTS = Check("augmented-latents", ("error",))
LATENTS_COLOR = Check("latents-color", ("error",))
DISTORTED_COLORS = Check("distorted-colors", ("warning",))


@dataclass(frozen=True, eq=False)
class Shards:
    """The shards of a data set in order of their names.

    ``where`` is the run file's key or the option that names them, ``location`` a folder, file or
    URI. ``samples`` is None without an index, ``latents`` is the resolution of latents in them, 0
    without any. ``header`` is that of the index.
    """

    where: str
    location: str
    bytes: NDArray[np.int64]
    """int64 (num_shards,)"""
    samples: NDArray[np.int64] | None = None
    """int64 (num_shards,)"""
    latents: int = 0
    header: IndexHeader | None = None

    def __len__(self) -> int:
        return len(self.bytes)


def of_index(index: ShardIndex, where: str) -> Shards:
    """Return the shards that an index lists.

    Raises:
        ShardError: the index is damaged.
    """
    order = np.argsort(np.array(index.names, dtype=object), kind="stable")
    header = index.header
    return Shards(
        where,
        str(index.path),
        index.bytes[order],
        index.samples[order],
        latents_of(header),
        header,
    )


def index_findings(config: RunConfig, document: dict[str, Any]) -> Iterator[Finding]:
    """Price a start without an index; ``document`` is that of ``cost --json``."""
    data = config.data
    if data.synthetic_samples or data.reader != "indexed":
        return
    if config.entry is not None or config.reads_index:
        return
    if config.data.samples is None:
        yield START_WITHOUT_INDEX.found(
            "info",
            "data.index",
            "every start reads the headers of all shards; set data.samples for an estimate",
            "run `sm-train index`, or set data.reader: webdataset",
        )
        return
    for stage in document["stages"]:
        processes = stage["world_size"]
        if not config.train_sharded:
            processes //= stage["instances"]
        seconds = config.data.samples * _SCAN_SECONDS / processes
        price = stage["price_per_instance_hour_usd"]
        usd = None if price is None else price * stage["instances"] * seconds / 3600
        yield START_WITHOUT_INDEX.found(
            "warning" if seconds > _LONG_SCAN_SECONDS else "info",
            "data.index",
            f"every start of {stage['name']} reads the headers of {config.data.samples:,} samples, "
            f"about {format_duration(seconds)}, {format_usd(usd)}",
            "run `sm-train index`, or set data.reader: webdataset",
        )


def epoch_findings(config: RunConfig, stages: Iterable[CostStage]) -> Iterator[Finding]:
    """Check how often each stage trains on each sample."""
    indexes = {stage.name: index for index, stage in enumerate(config.stages)}
    for unusual in unusual_epochs(stages, config):
        yield EPOCHS.found(
            "error" if unusual.is_mistake else "warning",
            f"stages[{indexes[unusual.stage]}].max_steps",
            unusual.message,
            "correct max_steps, or pack the missing images",
        )


def expiry_findings(expiries: Expiries, document: dict[str, Any], today: date) -> Iterator[Finding]:
    """Name the samples that expire before the run ends; ``document`` is that of ``cost --json``."""
    # The day counts as a whole.
    now = datetime.combine(today, time(), UTC) + timedelta(days=1)
    seconds = document["total"]["wall_seconds"]
    end = None if seconds is None else now + timedelta(seconds=float(seconds))
    warning = expiries.warning(end, now)
    if warning is not None:
        yield EXPIRING_SAMPLES.found(
            "warning",
            "data.expiry",
            warning.removeprefix("data.expiry: "),
            _expiry_fix(expiries, (end or now).date()),
        )


def _expiry_fix(expiries: Expiries, day: date) -> str:
    if expiries.is_missing or not expiries.counts:
        return "correct data.expiry, or pack the dates in ISO 8601, as in 2027-06-01"
    condition = "data.where" if expiries.channel is None else "the source's where"
    if expiries.are_dates and expiries.column.isidentifier():
        # As texts, too, the days are in their order.
        where = f"{expiries.column} < '{day}'"
        command = f'sm-train remove {expiries.shards} --where "{where}"'
        return f"`{command}`, or leave them out with {condition}"
    return f"remove them with `sm-train remove`, or leave them out with {condition}"


def augmentation_findings(shards: Shards, config: RunConfig) -> Iterator[Finding]:
    """Check that no stage augments images of which the shards hold latents."""
    keys = [key for key in ("flip", "caption") if getattr(config.data, key)]
    stages = [stage.name for stage in config.stages if stage.resolution == shards.latents]
    if keys and stages and config.entry is None:
        yield AUGMENTED_LATENTS.found(
            "error",
            f"data.{keys[0]}",
            f"{shards.location} holds latents of {shards.latents} px for {', '.join(stages)}; "
            f"{' and '.join(keys)} cannot change them",
            "pack without --latents, or leave the key out",
        )


def color_findings(location: str, header: IndexHeader, config: RunConfig) -> Iterator[Finding]:
    """Check that training sees the images as people do, and latents of its color policy.

    ``header`` is that of the index at ``location``.
    """
    policy = config.data.job_config().color
    latents = header.options.get("latents") or {}
    stages = [stage.name for stage in config.stages if stage.resolution == latents_of(header)]
    if stages and config.entry is None:
        problem = latents_problem(recorded_color(latents), policy, latents_of(header))
        if problem is not None:
            reason, fix = problem
            yield LATENTS_COLOR.found("error", "data.icc_profile", f"{location}: {reason}", fix)
            return
    for key, found, fix in ColorCounts.of(header.colors).distortions(policy):
        yield DISTORTED_COLORS.found("warning", f"data.{key}", f"{location}: {found}", fix)


def of_listing(
    shards: tuple[ListedShard, ...] | list[ListedShard], where: str, location: str
) -> Shards:
    """Return the shards of a listing, without their numbers of samples."""
    return Shards(where, location, np.array([shard.bytes for shard in shards], np.int64))


def shard_findings(
    shards: Shards, document: dict[str, Any], decode_workers: int, *, sharded: bool
) -> Iterator[Finding]:
    """Check the shards against every stage of ``document``, that of ``cost --json``.

    ``decode_workers`` is the number of decoders per GPU; ``sharded`` is false if every instance
    gets all shards.
    """
    for index, stage in enumerate(document["stages"]):
        where = f"stages[{index}].instances"
        if sharded and len(shards) < stage["instances"]:
            yield _idle_instances(shards, stage, where)
            continue
        if sharded:
            yield from _unequal_instances(shards, stage, where)
        yield from _few_samples(shards, stage, index)
    largest = max(document["stages"], key=lambda stage: int(stage["world_size"]))
    if not sharded or len(shards) >= largest["instances"]:
        yield from _shared_shards(shards, largest, decode_workers)
    if sharded and largest["instances"] > 1:
        yield ORDER_DEPENDS_ON_RANKS.found(
            "info",
            "data.sharded",
            f"{largest['name']} assigns shards to {largest['instances']} instances: another number "
            "of GPUs would train on the samples in another order",
            "set data.sharded: false if the order must not depend on the cluster",
        )
    yield from _shard_sizes(shards, largest["instances"])


def _idle_instances(shards: Shards, stage: dict[str, Any], where: str) -> Finding:
    instances = stage["instances"]
    idle = instances - len(shards)
    return IDLE_INSTANCES.found(
        "error",
        where,
        f"{len(shards)} shards for {instances} instances leave {idle} of them idle but billed, "
        f"{_share_usd(stage, idle / instances)}: the job fails at start-up",
        f"pack at least {instances} shards, ideally a multiple of that",
    )


def _unequal_instances(shards: Shards, stage: dict[str, Any], where: str) -> Iterator[Finding]:
    instances = stage["instances"]
    amounts = shards.bytes if shards.samples is None else shards.samples
    # Assumed assignment: shard i goes to instance i % instances, in order of the names.
    per_instance = np.bincount(
        np.arange(len(amounts)) % instances, weights=amounts, minlength=instances
    )
    # Every instance takes as many steps as the one with most data and repeats samples to get there.
    repeated = 1 - per_instance.mean() / per_instance.max() if per_instance.max() else 0.0
    if repeated < _UNEQUAL_INFO:
        return
    uneven = f"are not divisible by {instances} instances"
    if len(shards) % instances == 0:
        kind = "bytes" if shards.samples is None else "samples"
        uneven = f"are divisible by {instances} instances, but differ in {kind}"
    yield UNEQUAL_INSTANCES.found(
        "warning" if repeated >= _UNEQUAL_WARNING else "info",
        where,
        f"{len(shards)} shards {uneven}: {repeated:.1%} of {stage['name']} repeats samples, "
        f"{_share_usd(stage, repeated)}",
        f"pack a multiple of {instances} shards of nearly equal size",
    )


def _share_usd(stage: dict[str, Any], share: float) -> str:
    """Describe the cost of a share of the instances' time, per day if the duration is unknown."""
    if stage["breakdown_usd"].get("training"):
        return f"{format_usd(share * stage['breakdown_usd']['training'])} of its training"
    if stage["cluster_per_day_usd"]:
        return f"{format_usd(share * stage['cluster_per_day_usd'])} a day"
    return "at an unknown price"


def _shared_shards(shards: Shards, stage: dict[str, Any], decode_workers: int) -> Iterator[Finding]:
    gpus = stage["world_size"]
    if len(shards) < gpus * max(1, decode_workers):
        yield SHARED_SHARDS.found(
            "info",
            shards.where,
            f"{len(shards)} shards for {gpus} GPUs × {decode_workers} decoders of "
            f"{stage['name']}: shards are partitioned by sample, so none is idle",
            "none needed",
        )


def _few_samples(shards: Shards, stage: dict[str, Any], index: int) -> Iterator[Finding]:
    if shards.samples is None or not stage["effective_batch_size"]:
        return
    samples = int(shards.samples.sum())
    if samples < stage["effective_batch_size"]:
        yield FEW_SAMPLES.found(
            "warning",
            f"stages[{index}].per_device_batch_size",
            f"a step needs {stage['effective_batch_size']:,} samples, but {shards.location} has "
            f"{samples:,}",
            "lower the batch size, or check that no shards are missing",
        )


def _shard_sizes(shards: Shards, instances: int) -> Iterator[Finding]:
    total = int(shards.bytes.sum())
    small = int((shards.bytes < SMALLEST_BYTES).sum())
    # The last shard of a set contains the remainder, so a single small one is normal.
    if small > 1 or small == len(shards):
        mean = total / len(shards)
        avoidable = mean < FASTFILE_GOOD_BYTES and total >= instances * FASTFILE_GOOD_BYTES
        yield SMALL_SHARDS.found(
            "warning" if avoidable else "info",
            shards.where,
            f"{small} of {len(shards)} shards are below 2 GB ({mean / 1e6:,.0f} MB on average); "
            "FastFile is faster with few large files",
            "pack with a larger --shard-size"
            if total >= instances * SMALLEST_BYTES or avoidable
            else "pack larger shards once there is more data",
        )
    if large := int((shards.bytes > LARGEST_BYTES).sum()):
        yield LARGE_SHARDS.found(
            "info",
            shards.where,
            f"{large} of {len(shards)} shards are above 5 GB",
            "pack with a smaller --shard-size",
        )
