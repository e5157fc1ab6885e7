"""Prints a submission's plan: what runs, where, how long, at what cost, and what is unknown."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Protocol

from sm_train.cost.assumptions import Assumptions
from sm_train.cost.estimate import Estimate, Purchase, hourly_price
from sm_train.cost.instances import instance_type
from sm_train.cost.json_document import as_document
from sm_train.cost.speed import FIRM
from sm_train.entrypoints.base.pip_install import install_command
from sm_train.estimators.bundle.bundle import LARGE_BYTES, Bundle
from sm_train.estimators.config.cluster import ClusterSection
from sm_train.estimators.config.load import dotted
from sm_train.estimators.config.naming import ROLE_NOT_SET
from sm_train.estimators.config.schema import RunConfig
from sm_train.estimators.config.stage import StageSection
from sm_train.toolkit.base.extras import is_installed
from sm_train.toolkit.memory.memory_fit import moved_text_encoders, stages_short_of_memory
from sm_train.toolkit.planning.price_table import price_table
from sm_train.toolkit.planning.scope import (
    UNWATCHED,
    WATCHERS,
    enforcement_row,
    scope_rows,
    unusual_epochs,
)
from sm_train.toolkit.planning.spent import Projection
from sm_train.toolkit.planning.training_plans import TrainingPlan, plan_problems
from sm_train.toolkit.run_file.placeholders import find_placeholders
from sm_train.toolkit.submit.changes import Changes, KeyChange
from sm_train.toolkit.submit.planned_job import RunPlan
from sm_train.toolkit.submit.relocation import relocation_rows
from sm_train.toolkit.submit.submission import Submission
from sm_train.toolkit.terminal.formatting import (
    format_days,
    format_duration,
    format_number,
    format_percent,
    format_total_usd,
    format_usd,
    format_usd_range,
    printable,
)
from sm_train.toolkit.terminal.rich_table import rich_table

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_COLUMNS = ("stage", "cluster", "GPUs", "batch", "max_steps", "it/s", "time", "cost", "range")
_NARROW = 90
"""Width below which the table has no column max_steps, so that no cell wraps."""

_MAX_VALUE = 60
"""Characters of a changed value; longer ones are cut."""


class ShownPlan(Protocol):
    """A plan of any platform; :class:`RunPlan` describes the fields."""

    @property
    def stage(self) -> StageSection: ...
    @property
    def from_step(self) -> int: ...
    @property
    def cost(self) -> Estimate: ...
    @property
    def whole(self) -> Estimate: ...
    @property
    def projection(self) -> Projection | None: ...


def show_plan(plan: RunPlan, console: Console) -> None:
    """Print the plan of the whole run and what starts now, at most 100 columns wide."""
    from rich.text import Text

    submission = plan.submission
    console.print(f"\n[bold]Plan for {submission.config.name}[/] in {submission.region}\n")
    console.print(stage_table(submission.config, plan, console.width))
    console.print()
    rows = (*starts_now(plan), *_launches(submission), *_details(submission, plan.whole))
    console.print(two_columns(rows))
    for line in warnings(submission, plan.whole):
        console.print(Text.assemble(("\nWarning ", "bold"), printable(line)))
    missing = not_measured(plan)
    if missing:
        console.print("\n[bold]Not measured[/]")
        console.print(two_columns(("-", line) for line in missing))
    for line in _changes(plan.changes):
        console.print(line, markup=False)
    console.print()


def effective_rows(document: dict[str, Any], config: RunConfig) -> list[tuple[str, str]]:
    """Return a row with the share of the billed time that is expected to train, and what a failure
    costs: the start-up, and half of the steps between two checkpoints.
    """
    stages = [stage for stage in document["stages"] if stage["billable_seconds"]]
    if not stages or any(stage["training_seconds"] is None for stage in stages):
        return []
    share = sum(stage["training_seconds"] for stage in stages)
    share /= sum(stage["billable_seconds"] for stage in stages)
    text = f"{format_percent(share)} of the billed time is expected to train"
    if speed := stages[0]["steps_per_second"]:
        seconds = Assumptions().start_up_seconds + config.checkpoint.every_steps / speed / 2
        text += (
            f"; a failure costs about {format_duration(seconds)}: start-up, and steps made again"
        )
    return [("effective", text)]


def _data_source(config: RunConfig) -> str:
    """Describe where training jobs read the shards, and which of them each instance sees."""
    mounted = config.data.file_system
    if mounted is not None:
        return f"{mounted.id}:{mounted.directory} ({mounted.type}), a copy of {config.data.uri}"
    distribution = "ShardedByS3Key" if config.train_sharded else "FullyReplicated"
    return f"{config.data.uri} (FastFile, {distribution})"


def stage_table(config: RunConfig, plan: ShownPlan, width: int) -> Table:
    """Return the table of a run's stages, with cost and time of each."""
    shown = [name for name in _COLUMNS if name != "max_steps" or width >= _NARROW]
    table = rich_table(
        shown, right=[name for name in shown if name not in ("stage", "cluster")], gap=1
    )

    def add_row(*cells: str, style: str | None) -> None:
        by_name = dict(zip(_COLUMNS, cells, strict=True))
        table.add_row(*(by_name[name] for name in shown), style=style)

    document = as_document(plan.whole)
    for stage, priced in zip(config.stages, document["stages"], strict=True):
        gpus = instance_type(priced["instance_type"]).accelerators
        firm = priced["throughput_basis"] in FIRM or priced["steps_per_second"] is None
        add_row(
            stage.name,
            f"{priced['instances']} × {priced['instance_type']}",
            str(priced["instances"] * gpus),
            str(priced["effective_batch_size"]),
            f"{stage.max_steps:,}",
            ("" if firm else "~") + format_number(priced["steps_per_second"]),
            format_days(priced["billable_seconds"]),
            format_usd(priced["cost_usd"]),
            format_usd_range(priced),
            style="bold" if stage.name == plan.stage.name else None,
        )
    total = document["total"]
    days, cost = format_days(total["wall_seconds"]), format_total_usd(total)
    # What is left of a run that has begun is below the table.
    label = "total" if plan.projection is None or not plan.from_step else "from step 0"
    add_row(label, "", "", "", "", "", days, cost, format_usd_range(total), style="bold")
    return table


def two_columns(rows: Iterable[tuple[str, str]]) -> Table:
    """Return labels with values that wrap below themselves, not below the labels."""
    from rich.text import Text

    table = rich_table(gap=1)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for label, value in rows:
        table.add_row(f"  {label}", Text(printable(value)))
    return table


def starts_now(plan: ShownPlan) -> Iterator[tuple[str, str]]:
    """Yield what starts now, and at what cost."""
    now, whole = (as_document(cost)["total"] for cost in (plan.cost, plan.whole))
    steps = f" at step {plan.from_step:,} of {plan.stage.max_steps:,}" if plan.from_step else ""
    is_new = plan.projection is None or not plan.projection.known_spent_usd
    of_run = f" of {format_total_usd(whole)}" if is_new and now != whole else ""
    yield "starts now", f"{plan.stage.name}{steps}, {format_total_usd(now)}{of_run}"
    if not is_new:
        yield "the run", str(plan.projection)


def _launches(submission: Submission) -> Iterator[tuple[str, str]]:
    """Yield how each stage of a submission is launched."""
    for stage in submission.stages:
        launch = submission.launches[stage.name]
        yield "launch", f"{stage.name} by {launch.route}: {launch.reason}"
        if stage.sharding_reason is not None:
            yield "sharding", f"{stage.name} {stage.sharding}: {stage.sharding_reason}"
        if moved := moved_text_encoders(submission.config, stage):
            yield "encoders", f"{stage.name} text encoders {moved.placement}: {moved.reason}"


def _changes(changes: Changes | None) -> Iterator[str]:
    """Yield what has changed since the run's last submitted job."""
    if changes is None:
        return
    job = f"{changes.job} ({changes.created:%Y-%m-%d %H:%M})"
    if not changes.keys:
        yield f"\nNo changes since {job}"
        return
    yield f"\nChanges since {job}"
    yield from change_lines(changes.keys)


def change_lines(changes: Sequence[KeyChange]) -> Iterator[str]:
    """Yield a line for each changed key with its value before and after."""
    width = max(len(change.key) for change in changes)
    for change in changes:
        before, after = _format_value(change.before), _format_value(change.after)
        yield f"  {change.key:<{width}}  {before} → {after}"


def _format_value(value: Any) -> str:
    """Format a value of the run file as YAML does; a section or list by its size if it is long."""
    if value is None:
        return "not set"
    if isinstance(value, str):
        return value
    text = json.dumps(value)
    return text if len(text) <= _MAX_VALUE else f"{text[:_MAX_VALUE]}…"


def _details(submission: Submission, whole: Estimate) -> list[tuple[str, str]]:
    config, request = submission.config, submission.requests[0]
    bundle = submission.bundle
    price = as_document(submission.cost)["stages"][0]
    return [
        ("image", request["AlgorithmSpecification"]["TrainingImage"]),
        ("data", _data_source(config)),
        (
            "checkpoints",
            f"{request['CheckpointConfig']['S3Uri']}, every {config.checkpoint.every_steps}",
        ),
        ("capacity", f"{config.cluster.capacity}, {config.cluster.retries} retries"),
        *plan_rows(submission.training_plan, submission.plan_unknown),
        *_patch_rows(config.cluster),
        *scope_rows(as_document(whole), config),
        enforcement_row(as_document(whole), config, WATCHERS, UNWATCHED),
        *effective_rows(as_document(whole), config),
        (
            "bundle",
            f"{len(bundle.files)} files, {len(bundle.archive):,} bytes, "
            f"sha256 {bundle.sha256[:12]}…; starts {config.entry or bundle.entry}",
        ),
        ("price", f"{price['price_source']}, {price['price_date'] or 'undated'}"),
        *_alternative_rows(submission),
        *relocation_rows(config, submission.region, submission.stages[0].name),
    ]


def _patch_rows(cluster: ClusterSection) -> list[tuple[str, str]]:
    """Return a row with what ``cluster.request_patch`` adds, if it adds anything."""
    patch = cluster.request_patch
    return [("request", f"request_patch adds {json.dumps(patch, default=str)}")] if patch else []


def plan_rows(plan: TrainingPlan | None, unknown: str | None) -> list[tuple[str, str]]:
    """Return a row that describes the training plan, or says why it is ``unknown``."""
    if unknown is not None:
        fix = "`sm-train iam` prints the permission that describes it"
        return [("reserved", f"the training plan is unknown: {unknown}; {fix}")]
    return [] if plan is None else [("reserved", plan.describe(datetime.now(UTC)))]


def _alternative_rows(submission: Submission) -> list[tuple[str, str]]:
    """Return a row for each type the job may get, with its hourly price: speeds differ by type."""
    config, [first, *_] = submission.config, submission.stages
    if not config.cluster.alternatives:
        return []
    prices, capacity = price_table(), config.cluster.capacity
    hourly = {}
    for name in config.cluster.instance_types:
        count = config.cluster.equivalent_instances(name, first.instances)
        is_planned = name == config.cluster.instance_type or capacity != "training-plan"
        purchase = Purchase(submission.region, capacity if is_planned else "on-demand")
        price = hourly_price(name, purchase, prices).usd_per_instance_hour
        cost = "price unknown" if price is None else f"{format_usd(float(price * count))} an hour"
        hourly[name] = f"{count} × {name}, {cost}"
    [planned, *others] = hourly.values()
    return [
        ("first choice", f"{planned}; this estimate is for it"),
        *(("alternative", f"{other}; the same batch") for other in others),
    ]


def warnings(submission: Submission, whole: Estimate) -> list[str]:
    """Return what is unusual about the submission, though it may be intended."""
    lines = [
        f"{dotted(placeholder.path)}: {placeholder.value} is a placeholder; {placeholder.fix}: "
        "submit refuses it"
        for placeholder in find_placeholders(submission.config)
    ]
    if not is_installed("botocore"):
        lines.append(f"the request is not validated: {install_command('aws')}")
    now = datetime.now(UTC)
    seconds = as_document(whole)["total"]["wall_seconds"]
    end = None if seconds is None else now + timedelta(seconds=float(seconds))
    expired = (expiries.warning(end, now) for expiries in submission.expiries)
    lines += [line for line in expired if line is not None]
    if submission.training_plan is not None:
        needed = None if end is None else (end - now).total_seconds()
        problems = plan_problems(
            submission.training_plan, submission.config, submission.region, needed, now
        )
        lines += [f"cluster.training_plan: {message}; {fix}" for _, message, fix in problems]
    return lines + run_warnings(submission.config, whole, submission.bundle)


def run_warnings(config: RunConfig, whole: Estimate, bundle: Bundle) -> list[str]:
    """Return what is unusual about a run, whatever platform it is for: its epochs, the GPU memory
    that it needs, and the size of its bundle. ``whole`` is the estimate of all stages.
    """
    stages = [priced_stage.stage for priced_stage in whole.stages]
    lines = [epoch.message for epoch in unusual_epochs(stages, config)]
    lines += stages_short_of_memory(config)
    size = len(bundle.archive)
    if size <= LARGE_BYTES:
        return lines
    largest = max(bundle.files, key=lambda file: file.bytes)
    return [
        *lines,
        f"the bundle has {size / 1e6:.0f} MB, and every instance downloads it at every start; its "
        f"largest file is {largest.path} ({largest.bytes / 1e6:.0f} MB): exclude what the job does "
        "not need in .smtrainignore, or provide data through channels",
    ]


def not_measured(plan: RunPlan) -> list[str]:
    """Return the values that the plan estimates or does not know, each with its fix."""
    lines = []
    if plan.submission.requests[0]["RoleArn"] == ROLE_NOT_SET:
        lines.append("role: not in the run file; submit requires it")
    for stage in as_document(plan.whole)["stages"]:
        if stage["throughput_basis"] not in FIRM:
            lines.append(
                f"it/s of {stage['name']}: estimated ({stage['throughput_basis']}), and with it "
                "its time and cost; measure it and set steps_per_second"
            )
        if stage["price_per_instance_hour_usd"] is None:
            lines.append(f"price of {stage['instance_type']}: no published training price")
    return list(dict.fromkeys(lines))
