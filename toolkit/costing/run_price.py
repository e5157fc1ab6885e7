"""Estimate a run, a stage or a number of steps from the run file and the run's history."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sm_train.cost.assumptions import Assumptions, learned
from sm_train.cost.estimate import Estimate, Purchase, estimate
from sm_train.cost.throughput import StageMeasurement
from sm_train.estimators.config.schema import RunConfig
from sm_train.estimators.config.stage import StageSection
from sm_train.estimators.cost_stages import cost_stages
from sm_train.toolkit.costing.history import History
from sm_train.toolkit.costing.price_table import price_table
from sm_train.toolkit.costing.stages import stages_to_price, stated_measurements, with_model_figures
from sm_train.toolkit.errors import UserError


def estimate_run(
    config: RunConfig,
    region: str,
    stages: tuple[StageSection, ...] | None = None,
    history: History | None = None,
    stated: RunConfig | None = None,
    measured: Sequence[StageMeasurement] | None = None,
    is_running: bool = False,
) -> Estimate:
    """Estimate ``stages``, or the whole run, using the ``history`` of its finished jobs.

    If ``config`` has been changed for another cluster or region, ``stated`` is the original one,
    whose stated speeds are carried over. ``measured`` replaces the speeds of the history, and may
    be of another batch. A job that ``is_running`` has started up already.

    Raises:
        UserError: a figure of the run file is implausible, such as a thousand years of training.
    """
    names = {stage.name for stage in stages or config.stages}
    try:
        rescale_batch = measured is not None
        speeds = list(measured or ()) if rescale_batch else _speeds_of(history)
        if stated is not None and stated is not config:
            carried = stated_measurements(
                with_model_figures(stage, stated) for stage in cost_stages(stated)
            )
            # The last one counts: what was measured, if anything was.
            speeds = [*(StageMeasurement("", speed) for speed in carried), *speeds]
        priced = stages_to_price(config, speeds, rescale_batch=rescale_batch)
        chosen = [stage for stage in priced if stage.name in names]
        assumptions = learned(Assumptions(), history.observed) if history else None
        if is_running:
            assumptions = replace(assumptions or Assumptions(), start_up_seconds=0.0)
        purchase = Purchase(region, config.cluster.capacity)
        return estimate(chosen, purchase, assumed=assumptions, prices=price_table())
    except ValueError as error:
        raise UserError(str(error)) from None


def estimate_remaining(
    config: RunConfig,
    region: str,
    stage: StageSection,
    from_step: int,
    history: History | None = None,
    stated: RunConfig | None = None,
) -> Estimate:
    """Estimate the steps of ``stage`` after ``from_step`` (:func:`estimate_run`)."""
    left = max(1, stage.max_steps - from_step)
    return estimate_steps(config, region, stage, left, history, stated)


def estimate_steps(
    config: RunConfig,
    region: str,
    stage: StageSection,
    max_steps: int,
    history: History | None = None,
    stated: RunConfig | None = None,
    measured: Sequence[StageMeasurement] | None = None,
    is_running: bool = False,
) -> Estimate:
    """Estimate ``max_steps`` of ``stage``, with a start-up unless it is running
    (:func:`estimate_run`).
    """
    shortened = stage.model_copy(update={"max_steps": max_steps})
    stages = [shortened if other is stage else other for other in config.stages]
    return estimate_run(
        config.model_copy(update={"stages": stages}),
        region,
        (shortened,),
        history,
        stated,
        measured,
        is_running,
    )


def _speeds_of(history: History | None) -> list[StageMeasurement]:
    return [] if history is None else history.stage_measurements()
