"""What would go wrong, or cost more than it should, found before money is spent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from sm_train.cost.alternatives import USABLE_MEMORY
from sm_train.cost.document import as_document
from sm_train.cost.estimate import Estimate
from sm_train.cost.instances import instance_type
from sm_train.cost.speed import FIRM
from sm_train.estimators.request import staging_bucket
from sm_train.estimators.run_config import RunConfig
from sm_train.toolkit.amounts import dollars, span, total_dollars
from sm_train.toolkit.errors import UserError
from sm_train.toolkit.memory_fit import changes, fit

_FASTFILE_GOOD_BYTES = 150 * 2**20
"""FastFile suits few large files, from about 150 MB (SageMaker developer guide)."""


@dataclass(frozen=True)
class Finding:
    """One finding; ``where`` is a place in the run file, ``fix`` says what to do."""

    level: Literal["error", "warning", "info"]
    code: str
    where: str
    message: str
    fix: str

    def as_dict(self) -> dict[str, str]:
        return asdict(self)


def offline_findings(config: RunConfig, estimate: Estimate, base: Path) -> Iterator[Finding]:
    """What the run file, the prices and the local copy of the shards (relative to ``base``) say."""
    document = as_document(estimate)
    yield from _money(config, document)
    yield from _time(config, document)
    yield from _memory(config)
    if config.role is None:
        yield Finding(
            "warning", "role-missing", "role", "is not set", "submit needs the role's ARN"
        )
    if config.data.local is not None:
        yield from _shards(config, base / config.data.local)


def _money(config: RunConfig, document: dict[str, Any]) -> Iterator[Finding]:
    for index, stage in enumerate(document["stages"]):
        where = f"stages[{index}]"
        if stage["throughput_basis"] not in FIRM:
            yield Finding(
                "warning", "throughput-unmeasured", f"{where}.iterations_per_second",
                f"no it/s was measured for {stage['name']}: its time and cost are "
                + (f"worked out ({stage['throughput_basis']})" if stage["cost_usd"] else "unknown"),
                "measure a few hundred steps of this stage and write the figure",
            )  # fmt: skip
        if stage["price_per_instance_hour_usd"] is None:
            yield Finding(
                "warning", "price-unknown", "cluster.instance_type",
                f"{stage['instance_type']} has no published training price",
                "ask AWS, and take the total as a lower bound",
            )  # fmt: skip
    total = document["total"]
    if config.budget and total["cost_at_least_usd"] > config.budget.usd:
        yield Finding(
            "error" if config.budget.on_exceed == "stop" else "warning", "over-budget",
            "budget.usd",
            f"the run costs {total_dollars(total)}, more than {dollars(config.budget.usd)}",
            "raise the budget or shorten the run",
        )  # fmt: skip


def _time(config: RunConfig, document: dict[str, Any]) -> Iterator[Finding]:
    for stage in document["stages"]:
        seconds = stage["billable_seconds"]
        if seconds is not None and seconds > config.cluster.max_runtime:
            firm = stage["throughput_basis"] in FIRM
            yield Finding(
                "error" if firm else "warning", "max-runtime-short", "cluster.max_runtime",
                f"{stage['name']} takes {span(seconds)} and the job is ended after "
                f"{span(config.cluster.max_runtime)}",
                "raise max_runtime (28d at most) or split the stage",
            )  # fmt: skip


def _memory(config: RunConfig) -> Iterator[Finding]:
    """By the plan of the model: within its error the GPU's memory is called tight."""
    machine = instance_type(config.cluster.instance_type)
    have = machine.accelerator_memory_gib
    for index, stage in enumerate(config.stages):
        found = fit(config, stage)
        if found is None or have is None or found.gib <= USABLE_MEMORY * have:
            continue
        mend = next(
            (
                change
                for change in changes(stage, machine)
                if (other := fit(config, stage, **change)) and other.gib <= USABLE_MEMORY * have
            ),
            None,
        )
        tight = found.gib <= have
        yield Finding(
            "warning" if tight else "error",
            "memory-tight" if tight else "memory-short",
            f"stages[{index}].per_gpu_batch",
            f"{stage.name} takes about {found.gib:.0f} GiB of each {machine.accelerator}'s "
            f"{have:.0f}: {found.states / 2**30:.0f} of weights, gradients and optimizer, "
            f"{found.activations / 2**30:.0f} of activations for {found.images} images",
            "write " + ", ".join(f"{key}: {str(value).lower()}" for key, value in mend.items())
            if mend
            else "take a type with more memory, or a smaller model",
        )


def _shards(config: RunConfig, folder: Path) -> Iterator[Finding]:
    shards = sorted(folder.rglob("*.tar"))
    sizes = [path.stat().st_size for path in shards]
    if not sizes:
        yield Finding(
            "error", "no-shards", "data.local", f"{folder} holds no .tar", "run sm-train pack"
        )
        return
    for index, stage in enumerate(config.stages):
        where = f"stages[{index}].instances"
        if len(sizes) < stage.instances:
            yield Finding(
                "error", "idle-instances", where,
                f"{len(sizes)} shards for {stage.instances} instances leave "
                f"{stage.instances - len(sizes)} of them idle, and billed",
                f"pack at least {stage.instances} shards",
            )  # fmt: skip
        elif len(sizes) % stage.instances:
            yield Finding(
                "warning", "unequal-instances", where,
                f"{len(sizes)} shards do not divide by {stage.instances} instances: some read "
                "their data more often than others",
                f"pack a multiple of {stage.instances} shards",
            )  # fmt: skip
    small = sum(size < _FASTFILE_GOOD_BYTES for size in sizes)
    if small:
        yield Finding(
            "info", "small-shards", "data",
            f"{small} of {len(sizes)} shards are below 150 MB; FastFile suits few large files",
            "pack with a larger --shard-size when there is more data",
        )  # fmt: skip
    known = _index_sizes(folder)
    if known is None:
        yield from _broken(shards)
    else:
        yield from _changed(folder, shards, known)


def _index_sizes(folder: Path) -> dict[str, int] | None:
    """Name → bytes of the index beside ``folder``; None without one that can be read."""
    from sm_train.entrypoints.shard_index import ShardIndex, index_of
    from sm_train.entrypoints.shards import ShardError

    try:
        index = ShardIndex(index_of(folder))
        return dict(zip(index.names, index.bytes.tolist(), strict=True))
    except (OSError, ShardError):
        return None


def _changed(folder: Path, shards: list[Path], known: dict[str, int]) -> Iterator[Finding]:
    """By their sizes: reading shards that an index describes would take hours, each time."""
    found = {path.relative_to(folder).as_posix(): path.stat().st_size for path in shards}
    for name in sorted(found.keys() | known.keys()):
        if found.get(name) != known.get(name):
            said = f"{known[name]:,} bytes" if name in known else "nothing"
            real = f"has {found[name]:,} bytes" if name in found else "is not there"
            yield Finding(
                "error", "index-stale", "data.local",
                f"{name} {real}, the index says {said}",
                "run sm-train index, or pack it again",
            )  # fmt: skip


def _broken(shards: list[Path]) -> Iterator[Finding]:
    from sm_train.entrypoints.shards import ShardError, verify_shard

    for path in shards:
        try:
            verify_shard(path)
        except ShardError as error:
            yield Finding("error", "broken-shard", "data.local", str(error), "pack it again")


def online_findings(config: RunConfig, region: str, profile: str | None) -> Iterator[Finding]:
    """What AWS says of credentials, buckets and the number of shards."""
    from sm_train.toolkit import aws

    session = aws.open_session(profile, region)
    largest = max(stage.instances for stage in config.stages)
    data_bucket = config.data.uri.split("/")[2]
    checks: list[tuple[str, str, Callable[[], None]]] = [
        ("bucket", "bucket", lambda: aws.require_bucket(
            session, staging_bucket(config, region), region, "bucket")),
        ("data-bucket", "data.uri", lambda: aws.require_bucket(
            session, data_bucket, region, "data.uri")),
        ("shard-count", "data.uri", lambda: aws.require_shards(session, config.data.uri, largest)),
        ("index-missing", "data.index", lambda: aws.require_index(
            session, config.data.uri, config.data.index_uri)),
    ]  # fmt: skip
    for code, where, check in checks:
        try:
            check()
        except UserError as error:
            message, _, fix = str(error).removeprefix(f"{where}: ").partition("; ")
            yield Finding("error", code, where, message, fix)
