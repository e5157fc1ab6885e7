"""Prints a submission's plan: what runs, where, how long, at what cost, and what is unknown."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sm_train.cost.estimate import Purchase, hourly_price
from sm_train.cost.instances import instance_type
from sm_train.cost.json_document import as_document
from sm_train.cost.speed import FIRM
from sm_train.estimators.bundle.bundle import LARGE_BYTES
from sm_train.estimators.config.load import dotted
from sm_train.estimators.config.naming import ROLE_NOT_SET
from sm_train.estimators.config.placeholders import find_placeholders
from sm_train.estimators.config.schema import RunConfig
from sm_train.toolkit.costing.price_table import price_table
from sm_train.toolkit.submit.relocation import relocation_rows
from sm_train.toolkit.submit.submission import Submission
from sm_train.toolkit.terminal.formatting import (
    format_days,
    format_duration,
    format_number,
    format_total_usd,
    format_usd,
    format_usd_range,
)

if TYPE_CHECKING:
    from rich.console import Console


def show_plan(submission: Submission, console: Console) -> None:
    """Print the plan, at most 100 columns wide on a wide terminal."""
    console.print(f"\n[bold]Plan for {submission.config.name}[/] in {submission.region}\n")
    console.print(_stage_table(submission))
    for stage in submission.stages:
        launch = submission.launches[stage.name]
        console.print(f"  {stage.name} starts by {launch.route}: {launch.reason}")
    console.print()
    for label, value in _details(submission):
        console.print(f"  {label:<12} {value}", markup=False)
    for line in warnings(submission):
        console.print(f"\n[bold]Warning[/] {line}")
    unknown = unknowns(submission)
    if unknown:
        console.print("\n[bold]Unknown[/]")
        for line in unknown:
            console.print(f"  - {line}", markup=False)
    console.print()


def _distribution(config: RunConfig) -> str:
    return "ShardedByS3Key" if config.train_sharded else "FullyReplicated"


def _stage_table(submission: Submission) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
    for name in (
        "stage",
        "cluster",
        "GPUs",
        "batch",
        "max_steps",
        "it/s",
        "time",
        "cost",
        "range",
    ):
        table.add_column(name, justify="left" if name in ("stage", "cluster") else "right")
    document = as_document(submission.cost)
    for stage, priced in zip(submission.stages, document["stages"], strict=True):
        gpus = instance_type(priced["instance_type"]).accelerators
        table.add_row(
            stage.name,
            f"{priced['instances']} × {priced['instance_type']}",
            str(priced["instances"] * gpus),
            str(priced["effective_batch_size"]),
            f"{stage.max_steps:,}",
            format_number(priced["steps_per_second"]),
            format_days(priced["billable_seconds"]),
            format_usd(priced["cost_usd"]),
            format_usd_range(priced),
        )
    total = document["total"]
    table.add_row(
        "[bold]total[/]",
        "",
        "",
        "",
        "",
        "",
        format_days(total["wall_seconds"]),
        format_total_usd(total),
        format_usd_range(total),
    )
    return table


def _details(submission: Submission) -> list[tuple[str, str]]:
    config, request = submission.config, submission.requests[0]
    bundle = submission.bundle
    price = as_document(submission.cost)["stages"][0]
    return [
        ("image", request["AlgorithmSpecification"]["TrainingImage"]),
        ("data", f"{config.data.uri} (FastFile, {_distribution(config)})"),
        (
            "checkpoints",
            f"{request['CheckpointConfig']['S3Uri']}, every {config.checkpoint.every_steps}",
        ),
        ("capacity", f"{config.cluster.capacity}, {config.cluster.retries} retries"),
        ("at most", f"{format_duration(config.cluster.max_runtime)} for each job"),
        (
            "bundle",
            f"{len(bundle.files)} files, {len(bundle.archive):,} bytes, "
            f"sha256 {bundle.sha256[:12]}…; starts {config.entry or bundle.entry}",
        ),
        ("price", f"{price['price_source']}, {price['price_date'] or 'undated'}"),
        *_alternative_rows(submission),
        *relocation_rows(config, submission.region, submission.stages[0].name),
    ]


def _alternative_rows(submission: Submission) -> list[tuple[str, str]]:
    """Return a row for each type the job may get, with its hourly price: speeds differ by type."""
    config, [first, *_] = submission.config, submission.stages
    if not config.cluster.alternatives:
        return []
    purchase, prices = Purchase(submission.region, config.cluster.capacity), price_table()
    hourly = {}
    for name in config.cluster.instance_types:
        count = config.cluster.equivalent_instances(name, first.instances)
        price = hourly_price(name, purchase, prices).usd_per_instance_hour
        cost = "price unknown" if price is None else f"{format_usd(float(price * count))} an hour"
        hourly[name] = f"{count} × {name}, {cost}"
    [planned, *others] = hourly.values()
    return [
        ("first choice", f"{planned}; the plan is for it"),
        *(("alternative", f"{other}; the same batch") for other in others),
    ]


def warnings(submission: Submission) -> list[str]:
    """Return what is unusual about the submission, though it may be intended."""
    lines = [
        f"{dotted(one.path)}: {one.value} is a placeholder; {one.fix}: submit refuses it"
        for one in find_placeholders(submission.config)
    ]
    size = len(submission.bundle.archive)
    if size <= LARGE_BYTES:
        return lines
    largest = max(submission.bundle.files, key=lambda file: file.bytes)
    return [
        *lines,
        f"the bundle has {size / 1e6:.0f} MB, and every instance downloads it at every start; its "
        f"largest file is {largest.path} ({largest.bytes / 1e6:.0f} MB): exclude what the job does "
        "not need in .smtrainignore, or provide data through channels",
    ]


def unknowns(submission: Submission) -> list[str]:
    """Return the values that the plan does not know, each with its fix."""
    lines = []
    if submission.requests[0]["RoleArn"] == ROLE_NOT_SET:
        lines.append("role: not in the run file; submit requires it")
    for stage in as_document(submission.cost)["stages"]:
        if stage["throughput_basis"] not in FIRM:
            lines.append(
                f"time and cost of {stage['name']}: its it/s was not measured "
                f"({stage['throughput_basis']}); measure it and write steps_per_second"
            )
        if stage["price_per_instance_hour_usd"] is None:
            lines.append(f"price of {stage['instance_type']}: no published training price")
    return list(dict.fromkeys(lines))
