"""The estimate of a run, a stage or a number of steps, from the run file and its history."""

from __future__ import annotations

from sm_train.cost.assumptions import Assumptions, learned
from sm_train.cost.estimate import Estimate, Purchase, estimate
from sm_train.estimators.config.schema import RunConfig
from sm_train.estimators.config.stage import StageSection
from sm_train.estimators.cost_stages import cost_stages
from sm_train.toolkit.costing.history import History
from sm_train.toolkit.costing.price_table import price_table
from sm_train.toolkit.costing.stages import known_speeds, stages_to_price, with_model
from sm_train.toolkit.costing.throughput import Measured
from sm_train.toolkit.errors import UserError


def estimate_run(
    config: RunConfig,
    region: str,
    stages: tuple[StageSection, ...] | None = None,
    history: History | None = None,
    stated: RunConfig | None = None,
) -> Estimate:
    """The estimate of ``stages``, or of the whole run, with what its finished jobs showed.

    ``stated`` is the run at its own place, where ``config`` is as it is at another: the speeds that
    it states are carried over.

    Raises:
        UserError: a figure of the run file that nobody could mean, such as a thousand years.
    """
    names = {stage.name for stage in stages or config.stages}
    try:
        measured = history.measured() if history else []
        if stated is not None and stated is not config:
            speeds = known_speeds(with_model(one, stated) for one in cost_stages(stated))
            measured += [Measured("", speed) for speed in speeds]
        chosen = [one for one in stages_to_price(config, measured) if one.name in names]
        assumed = learned(Assumptions(), history.observed) if history else None
        purchase = Purchase(region, config.cluster.capacity)
        return estimate(chosen, purchase, assumed=assumed, prices=price_table())
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
    """The estimate of what ``stage`` has still to do (:func:`estimate_run`)."""
    left = max(1, stage.max_steps - from_step)
    return estimate_steps(config, region, stage, left, history, stated)


def estimate_steps(
    config: RunConfig,
    region: str,
    stage: StageSection,
    max_steps: int,
    history: History | None = None,
    stated: RunConfig | None = None,
) -> Estimate:
    """The estimate of so many iterations of ``stage``, with a start-up of their own."""
    part = stage.model_copy(update={"max_steps": max_steps})
    stages = [part if one is stage else one for one in config.stages]
    return estimate_run(
        config.model_copy(update={"stages": stages}), region, (part,), history, stated
    )
