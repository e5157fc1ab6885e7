"""The actual cost of a run's jobs compared with the estimate, and stored for later estimates."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from sm_train.cost.actual_cost import FinishedJob, as_document, measurements, observed
from sm_train.cost.estimate import Estimate, estimate
from sm_train.cost.stage import CostStage
from sm_train.cost.timeline import Timeline
from sm_train.toolkit.base.errors import UserError
from sm_train.toolkit.planning.estimate_inputs import EstimateInputs
from sm_train.toolkit.platforms.find_run import find_run
from sm_train.toolkit.platforms.placed_run import PlacedRun
from sm_train.toolkit.runs.finished_jobs import read_jobs
from sm_train.toolkit.runs.run_state import read_state
from sm_train.toolkit.terminal.console import write_json, write_line, write_list, write_wrapped
from sm_train.toolkit.terminal.formatting import (
    format_days,
    format_percent,
    format_projection,
    format_signed_usd,
    format_usd,
)
from sm_train.toolkit.terminal.text_table import terminal_width, text_table


def show_actual_cost(
    inputs: EstimateInputs, run: str, places: dict[str, Any], *, as_json: bool
) -> None:
    """Print what the jobs of ``run`` cost, which is in these ``places``: region and profile.

    Raises:
        UserError: as :func:`actual_cost` does.
    """
    document = actual_cost(inputs, find_run(run, places))
    if as_json:
        write_json(document)
    else:
        _show(document)


def actual_cost(inputs: EstimateInputs, run: PlacedRun) -> dict[str, Any]:
    """Return the document of ``cost --actual``, and store what the jobs showed next to the run's
    code, if that has a bucket of its own.

    Raises:
        UserError: the run has no job yet, or its platform refuses a request.
    """
    assert inputs.config is not None
    run = run.with_config(inputs.config)
    named = {job.name for job in run.named_jobs()}
    state = read_state(run)
    jobs = read_jobs(run, run.jobs(state.now), inputs.prices, state.now)
    stored = {"history": None, "warnings": []} | _store(run, jobs)
    jobs = [job for job in jobs if job.name in named]
    stages = {stage.name for stage in inputs.stages}
    left = {name: usd for name, usd in state.projection.stages.items() if name in stages}
    return as_document(jobs, _expected(inputs, jobs), left) | stored


def _store(run: PlacedRun, jobs: list[FinishedJob]) -> dict[str, Any]:
    """Store what the jobs showed for later estimates; the comparison does not depend on it."""
    try:
        uri = run.store_history(observed(jobs), measurements(jobs))
    except UserError as error:
        return {"warnings": [f"not stored for later estimates: {error}"]}
    return {"history": uri}


def _expected(inputs: EstimateInputs, jobs: list[FinishedJob]) -> dict[str, Estimate]:
    """Estimate each stage for the steps that its jobs ran."""
    estimates = {}
    for stage in inputs.stages:
        timelines = _timelines(jobs, stage)
        done = max((timeline.last_step for timeline in timelines), default=0)
        done -= min((timeline.first_step for timeline in timelines), default=0)
        if done > 0:
            shortened = replace(stage, max_steps=done)
            estimates[stage.name] = estimate(
                [shortened], inputs.purchase, assumed=inputs.assumptions, prices=inputs.prices
            )
    return estimates


def _timelines(jobs: list[FinishedJob], stage: CostStage) -> list[Timeline]:
    return [job.timeline for job in jobs if job.stage == stage.name and job.timeline]


def _show(document: dict[str, Any]) -> None:
    """Print the jobs' actual cost, its breakdown, and the estimate."""
    total = document["total"]
    rows = [
        _actual_row("total", total),
        *(_actual_row(stage["name"], stage) for stage in document["stages"]),
    ]
    header = ("stage", "billed", "estimate", "difference", "goodput", "images", "$/M images")
    breakdown = text_table(("breakdown", "$", "share"), list(_breakdown_rows(total)), left=1)
    for line in (*text_table(header, rows, left=1, width=terminal_width()), "", *breakdown):
        write_line(line)
    write_wrapped(
        format_projection(total["billed_usd"], total["remaining_usd"], total["projected_usd"])
    )
    for job in document["jobs"]:
        write_wrapped(
            f"{job['name']}: {job['status']}, {format_days(job['billable_seconds'])}, "
            f"{job['instances']} × {job['instance_type']}, {format_usd(job['billed_usd'])}"
        )
    write_list("Warnings", document["warnings"])


def _actual_row(name: str, figures: dict[str, Any]) -> tuple[str, ...]:
    goodput, images = figures["goodput"], figures["images"]
    billed = figures["billed_usd"]
    return (
        name,
        format_usd(billed)
        if billed is not None
        else f"≥ {format_usd(figures['billed_at_least_usd'])}",
        format_usd(figures["estimate_usd"]),
        format_signed_usd(figures["difference_usd"]),
        "unknown" if goodput is None else format_percent(goodput),
        "unknown" if images is None else f"{images:,}",
        format_usd(figures["per_million_images_usd"]),
    )


def _breakdown_rows(total: dict[str, Any]) -> Iterable[tuple[str, str, str]]:
    billed = total["billed_usd"]
    yield "billed", format_usd(billed), "100.0%" if billed else ""
    for part, amount in total["waterfall_usd"].items():
        if part == "warm_pool" and amount == 0:
            continue
        share = "" if amount is None or not billed else format_percent(amount / billed)
        yield f"  {part.replace('_', ' ')}", format_usd(amount), share
