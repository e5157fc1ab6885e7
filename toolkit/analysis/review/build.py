"""Reviews jobs: resolves the targets, collects their facts and derives verdicts and charts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from math import isfinite, nan
from pathlib import Path

import numpy as np
from sm_train.cost.json_document import usd
from sm_train.estimators.config.schema import RunConfig
from sm_train.estimators.regions import DEFAULT_REGION
from sm_train.toolkit.analysis.review.collect import FactsCollector
from sm_train.toolkit.analysis.review.job_facts import JobFacts
from sm_train.toolkit.analysis.review.job_log import Column, finite
from sm_train.toolkit.analysis.review.log_parser import parse_log
from sm_train.toolkit.analysis.review.metric_export import Exported, export_jobs
from sm_train.toolkit.analysis.review.review_model import Figures, JobReview, Review
from sm_train.toolkit.analysis.review.sources import ReviewSource, local_sources, run_sources
from sm_train.toolkit.analysis.review.time_series import charts, marks, progress
from sm_train.toolkit.analysis.review.verdicts import judge
from sm_train.toolkit.analysis.review.verdicts.gpus import utilization, while_training
from sm_train.toolkit.aws.session import resolve_region
from sm_train.toolkit.memory.sharding_choice import with_sharding
from sm_train.toolkit.planning.price_table import price_table
from sm_train.toolkit.platforms.find_run import find_run, log_target
from sm_train.toolkit.platforms.target import Kind, Target
from sm_train.toolkit.run_file.run_file import load
from sm_train.toolkit.runs.run_state import read_state
from sm_train.toolkit.terminal.console import stderr_console


def build_review(
    targets: Sequence[str],
    *,
    region: str | None,
    profile: str | None,
    run_file: Path | None,
    with_samples: bool = False,
) -> Review:
    """Review all ``targets``: runs and jobs on SageMaker, local folders and logs.

    ``run_file`` provides the estimate for local logs. ``with_samples`` reads the images that
    evaluations sampled.

    Raises:
        UserError: a target does not exist, or AWS rejects a request.
    """
    config = with_sharding(load(run_file)) if run_file else None
    sources, region = find_sources(targets, region=region, profile=profile, config=config)
    runs = {source.run.name: source.run for source in sources if source.run is not None}
    collector = FactsCollector(region, price_table(), config, with_samples=with_samples)
    collector.now = max((run.now() for run in runs.values()), default=datetime.now(UTC))
    jobs = [review_job(collector.collect(source)) for source in _with_progress(sources)]
    projections = {name: read_state(run).projection.as_dict() for name, run in runs.items()}
    return Review(tuple(jobs), tuple(collector.warnings), projections)


def export(
    targets: Sequence[str],
    *,
    region: str | None,
    profile: str | None,
    target_format: str,
    folder: Path,
) -> list[Exported]:
    """Write the metrics of all ``targets`` below ``folder``.

    Raises:
        UserError: a target does not exist, AWS rejects a request, or a job's folder exists.
    """
    sources, _ = find_sources(targets, region=region, profile=profile, config=None)
    return export_jobs(sources, lambda source: parse_log(source.blocks()), target_format, folder)


def find_sources(
    targets: Sequence[str], *, region: str | None, profile: str | None, config: RunConfig | None
) -> tuple[list[ReviewSource], str]:
    """Return the jobs of all ``targets``, and their region.

    Raises:
        UserError: a target does not exist, or AWS rejects a request.
    """
    named = [log_target(target) for target in targets]
    uses_aws = any(target.kind in (Kind.RUN_FILE, Kind.NAME) for target in named)
    region = _region(named, region, profile, config, uses_aws=uses_aws)
    options, sources = {"region": region, "profile": profile}, list[ReviewSource]()
    for target in named:
        if target.is_read_as_files:
            sources += local_sources(target.path)
        else:
            sources += run_sources(find_run(target.address, options))
    # A job that two targets name is reviewed once.
    return list({source.name: source for source in sources}.values()), region


def _region(
    targets: Sequence[Target],
    option: str | None,
    profile: str | None,
    config: RunConfig | None,
    *,
    uses_aws: bool,
) -> str:
    """Return the region of the option, else of the first run file, else a default."""
    run_files = [target.path for target in targets if target.kind is Kind.RUN_FILE]
    regions = [load(path).region for path in run_files]
    configured = next(
        (region for region in (*regions, config.region if config else None) if region), None
    )
    if uses_aws:
        return resolve_region(option, configured, profile)
    return option or configured or DEFAULT_REGION


def _with_progress(sources: Sequence[ReviewSource]) -> Iterator[ReviewSource]:
    from rich.progress import track

    console = stderr_console()
    yield from track(
        sources, "reading", console=console, transient=True, disable=not console.is_terminal
    )


def review_job(facts: JobFacts) -> JobReview:
    """Derive the review of one job from its facts."""
    return JobReview(
        name=facts.name,
        run=facts.run,
        stage=facts.stage,
        begin=facts.begin,
        passed_seconds=facts.end - facts.begin,
        figures=_figures(facts),
        verdicts=judge(facts),
        charts=charts(facts),
        marks=marks(facts),
        progress=progress(facts),
        settings=facts.settings,
        samples=facts.samples,
    )


def _figures(facts: JobFacts) -> Figures:
    start = facts.log.last("start") or {}
    steps, timeline = facts.log.steps, facts.timeline
    speed = timeline.steps_per_second if timeline else None
    batch = start.get("effective_batch_size")
    billed, estimate = facts.cost.billed, facts.cost.estimate
    expected = None if estimate is None else usd(estimate.cost)
    gpu_shares = [while_training(facts, *pair) for pair in utilization(facts).values()]
    evaluation_losses = [
        event["loss"] for event in facts.log.events["eval"] if event["loss"] is not None
    ]
    # A run whose loss became NaN has no loss to compare.
    last_loss = float(steps["loss"][-1]) if len(steps["loss"]) else nan
    instance_type = facts.instance_type.name if facts.instance_type else start.get("instance_type")
    return Figures(
        status=facts.outcome.status if facts.outcome else None,
        backend=start.get("backend"),
        instance_type=instance_type,
        instances=facts.instances,
        world_size=start.get("world_size"),
        resolution=start.get("resolution"),
        effective_batch_size=start.get("effective_batch_size"),
        first_step=timeline.first_step if timeline else None,
        last_step=timeline.last_step if timeline else None,
        max_steps=start.get("max_steps"),
        steps_per_second=speed,
        images_per_second=speed * batch if speed and batch else None,
        loss=last_loss if isfinite(last_loss) else None,
        evaluation_loss=evaluation_losses[-1] if evaluation_losses else None,
        mfu=_median(steps["mfu"]),
        gpu_utilization=_mean(np.concatenate(gpu_shares)) if gpu_shares else None,
        data_wait_share=timeline.data_wait_share if timeline else None,
        goodput=timeline.seconds["useful"] / facts.seconds if timeline else None,
        restarts=timeline.restarts if timeline else None,
        stalls=len(facts.log.stalls) if timeline else None,
        billable_seconds=facts.seconds if facts.billed else None,
        billed_usd=billed,
        estimate_usd=expected,
        difference_usd=None if billed is None or expected is None else billed - expected,
        seconds=dict(timeline.seconds) if timeline else None,
    )


def _median(values: Column) -> float | None:
    known = finite(values)
    return float(np.median(known)) if len(known) else None


def _mean(values: Column) -> float | None:
    known = finite(values)
    return float(known.mean()) if len(known) else None
