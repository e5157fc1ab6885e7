"""From targets to a review: which jobs are meant, their facts, and what is said of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from sm_train.cost.json_document import usd
from sm_train.estimators.config.schema import RunConfig
from sm_train.toolkit.aws.session import open_session, resolve_region
from sm_train.toolkit.costing.price_table import DEFAULT_REGION, price_table
from sm_train.toolkit.errors import UserError
from sm_train.toolkit.jobs.training_job import is_valid_job_name, server_time
from sm_train.toolkit.review.collect import Gatherer
from sm_train.toolkit.review.job_facts import JobFacts
from sm_train.toolkit.review.job_log import Column, finite
from sm_train.toolkit.review.model import Figures, Review, Reviewed
from sm_train.toolkit.review.sources import ReviewSource, here, on_sagemaker
from sm_train.toolkit.review.time_series import charts, marks
from sm_train.toolkit.review.verdicts import judge
from sm_train.toolkit.review.verdicts.gpus import utilization, while_training
from sm_train.toolkit.review.verdicts.speed import steady_speeds
from sm_train.toolkit.run_file import RUN_FILE_ENDINGS, load
from sm_train.toolkit.terminal.console import stderr_console


def build_review(
    targets: Sequence[str], *, region: str | None, profile: str | None, run_file: Path | None
) -> Review:
    """Review what ``targets`` name: runs and jobs on SageMaker, folders and logs here.

    ``run_file`` gives the estimate of those that lie here.

    Raises:
        UserError: a target is not there, or AWS refuses.
    """
    config = load(run_file) if run_file else None
    places = [None if _on_sagemaker(target) else Path(target) for target in targets]
    region = _region(targets, region, profile, config, asks=None in places)
    session = open_session(profile, region) if None in places else None
    sources: list[ReviewSource] = []
    for target, place in zip(targets, places, strict=True):
        sources += here(place) if place else on_sagemaker(session, target, region)
    gatherer = Gatherer(region, price_table(), session, config)
    if session is not None:
        gatherer.now = server_time(session)
    jobs = [reviewed(gatherer.gather(source)) for source in _shown(_unique(sources))]
    return Review(tuple(jobs), tuple(gatherer.notes))


def _on_sagemaker(target: str) -> bool:
    """A run file means its jobs; any other path that is there means itself.

    Raises:
        UserError: it is neither there nor can it be a name.
    """
    if target.endswith(RUN_FILE_ENDINGS):
        return True
    if Path(target).exists():
        return False
    if not is_valid_job_name(target):
        raise UserError(f"{target}: no such file or folder; name a run, a job, a folder or a log")
    return True


def _region(
    targets: Sequence[str],
    option: str | None,
    profile: str | None,
    config: RunConfig | None,
    *,
    asks: bool,
) -> str:
    files = [load(Path(one)).region for one in targets if one.endswith(RUN_FILE_ENDINGS)]
    own = next((one for one in (*files, config.region if config else None) if one), None)
    if asks:
        return resolve_region(option, own, profile)
    return option or own or DEFAULT_REGION


def _unique(sources: Sequence[ReviewSource]) -> list[ReviewSource]:
    """A job that two targets name is reviewed once."""
    return list({source.name: source for source in sources}.values())


def _shown(sources: Sequence[ReviewSource]) -> Iterator[ReviewSource]:
    from rich.progress import track

    console = stderr_console()
    yield from track(
        sources, "reading", console=console, transient=True, disable=not console.is_terminal
    )


def reviewed(facts: JobFacts) -> Reviewed:
    """What is said of one job."""
    return Reviewed(
        name=facts.name,
        run=facts.run,
        stage=facts.stage,
        begin=facts.begin,
        end=facts.end,
        figures=_figures(facts),
        verdicts=judge(facts),
        charts=charts(facts),
        marks=marks(facts),
    )


def _figures(facts: JobFacts) -> Figures:
    start = facts.log.last("start") or {}
    steps, line, money = facts.log.steps, facts.line, facts.money
    billed, estimate = money.billed, money.estimate
    expected = None if estimate is None else usd(estimate.cost)
    busy = [while_training(facts, *pair) for pair in utilization(facts).values()]
    evaluated = [one["loss"] for one in facts.log.events["eval"] if one["loss"] is not None]
    losses = finite(steps["loss"])
    return Figures(
        status=facts.ending.status if facts.ending else None,
        backend=start.get("backend"),
        instance_type=facts.machine.name if facts.machine else start.get("instance_type"),
        instances=facts.instances,
        world_size=start.get("world_size"),
        resolution=start.get("resolution"),
        effective_batch_size=start.get("effective_batch_size"),
        first_step=line.first_step if line else None,
        last_step=line.last_step if line else None,
        max_steps=start.get("max_steps"),
        steps_per_second=_median(steady_speeds(facts)[1]),
        images_per_second=_median(steps["images_per_second"]),
        loss=float(losses[-1]) if len(losses) else None,
        evaluation_loss=evaluated[-1] if evaluated else None,
        mfu=_median(steps["mfu"]),
        gpu_utilization=_mean(np.concatenate(busy)) if busy else None,
        data_wait_share=_mean(steps["data_wait_share"]),
        goodput=line.seconds["useful"] / facts.seconds if line else None,
        restarts=line.restarts if line else None,
        stalls=len(facts.log.stalls) if line else None,
        billable_seconds=facts.seconds if facts.billed else None,
        billed_usd=billed,
        estimate_usd=expected,
        difference_usd=None if billed is None or expected is None else billed - expected,
        seconds=dict(line.seconds) if line else {},
    )


def _median(values: Column) -> float | None:
    known = finite(values)
    return float(np.median(known)) if len(known) else None


def _mean(values: Column) -> float | None:
    known = finite(values)
    return float(known.mean()) if len(known) else None
