"""The scope of a run: samples and epochs, the worst case in dollars, and the budget."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sm_train.cost.estimate import total
from sm_train.cost.stage import CostStage
from sm_train.toolkit.terminal.formatting import format_duration, format_usd

if TYPE_CHECKING:
    from sm_train.estimators.config.operations import BudgetSection
    from sm_train.estimators.config.schema import RunConfig

_SECONDS_PER_HOUR = 3600

MANY_EPOCHS, MANY_ADAPTER_EPOCHS = 100, 1_000
"""More are unusual, and a reason to look at the data. An adapter is trained on few images."""

MOST_EPOCHS = 10_000
"""More are a mistake. DiT-XL/2 saw ImageNet 1,400 times: 7 million steps of 256 images (Peebles and
Xie 2023, section 5), which is unusually long."""


@dataclass(frozen=True)
class UnusualEpochs:
    """A stage whose number of epochs is unusual, or so large that it is a mistake."""

    stage: str
    is_mistake: bool
    message: str


def unusual_epochs(
    stages: Iterable[CostStage], config: RunConfig | None
) -> Iterator[UnusualEpochs]:
    """Yield the stages with less than one epoch or with too many.

    Those whose number of images or samples is unknown are left out.
    """
    is_adapter = config is not None and config.model.lora is not None
    many = MANY_ADAPTER_EPOCHS if is_adapter else MANY_EPOCHS
    for stage in stages:
        if stage.epochs is None or 1 <= stage.epochs <= many:
            continue
        few = f"{stage.epochs:.0%} of one epoch"
        epochs = few if stage.epochs < 1 else f"{format_epochs(stage.epochs)} epochs"
        yield UnusualEpochs(
            stage.name,
            stage.epochs > MOST_EPOCHS,
            f"{stage.max_steps:,} steps of {stage.name} train on {stage.images:,} images, and the "
            f"shards hold {stage.samples:,}: {epochs}",
        )


def scope_rows(document: dict[str, Any], config: RunConfig) -> list[tuple[str, str]]:
    """Return label and text of samples and epochs, the worst case and the budget.

    ``document`` is that of ``cost --json``, of the stages that are meant.
    """
    stages = document["stages"]
    return [
        ("samples", _samples(stages)),
        ("worst case", _worst_case(document, config)),
        ("budget", _budget(document, config)),
    ]


@dataclass(frozen=True)
class Enforcer:
    """What stops a run at its budget: ``seconds`` pass at most until its nodes have stopped."""

    who: str
    seconds: float


WATCHERS = (
    Enforcer("this laptop while `sm-train watch` runs", 60.0 + 120.0),
    Enforcer("the function of `sm-train template watch-lambda`", 300.0 + 120.0),
)
"""SageMaker's jobs are stopped by whoever watches: after at most a poll, and 120 s for a stop."""

UNWATCHED = "while neither polls, nobody before cluster.max_runtime"


def enforcement_row(
    document: dict[str, Any],
    config: RunConfig,
    enforcers: Sequence[Enforcer],
    otherwise: str | None = None,
) -> tuple[str, str]:
    """Return label and text of who stops the run at its budget, and what that may exceed it by.

    ``document`` is that of ``cost --json``; ``otherwise`` says what happens without them.
    """
    label = "enforced by"
    if config.budget is None:
        return label, "nobody: the run has no budget.usd"
    if config.budget.on_exceed == "warn":
        return label, "nobody: budget.on_exceed is warn"
    hourly = [
        None
        if stage["price_per_instance_hour_usd"] is None
        else stage["price_per_instance_hour_usd"] * stage["instances"]
        for stage in document["stages"]
    ]
    known = [usd for usd in hourly if usd is not None]
    if not enforcers or len(known) < len(hourly):
        why = "a price is unknown" if enforcers else "nothing watches the run"
        return label, f"nobody: {why}"
    texts = [
        f"{each.who}: up to {format_usd(max(known) * each.seconds / _SECONDS_PER_HOUR)} more than "
        "the budget"
        for each in enforcers
    ]
    return label, "; ".join(filter(None, (*texts, otherwise)))


def format_epochs(epochs: float) -> str:
    """Format a number of epochs: two digits below 10, and whole ones from there."""
    return f"{epochs:,.0f}" if epochs >= 10 else f"{epochs:.2g}"


def _samples(stages: list[dict[str, Any]]) -> str:
    samples = stages[0]["samples"]
    if samples is None:
        return "unknown, and so are epochs: run `sm-train index`, or set data.samples"
    epochs = ", ".join(
        f"{format_epochs(stage['epochs'])} of {stage['name']}"
        for stage in stages
        if stage["epochs"] is not None
    )
    return f"{samples:,}; epochs: {epochs}"


def _worst_case(document: dict[str, Any], config: RunConfig) -> str:
    cluster, attempts = config.cluster, max(1, config.recovery.max_attempts)
    amounts = [stage["job_at_most_usd"] for stage in document["stages"]]
    each = "a job of each stage" if len(amounts) > 1 else "a job"
    limit = f"{format_duration(cluster.max_runtime)}, retries included"
    text = f"{format_usd(total(amounts))} if {each} runs until max_runtime ({limit})"
    if attempts > 1:
        most = format_usd(document["total"]["cost_at_most_usd"])
        text += f"; {most} if `watch` starts {attempts} jobs of each without a new checkpoint"
    return text


def _budget(document: dict[str, Any], config: RunConfig) -> str:
    if config.budget is None:
        return "none; budget.usd limits the run"
    limit = format_usd(config.budget.usd)
    if config.budget.on_exceed == "warn":
        return f"{limit}; a warning when it is exceeded"
    restriction = budget_restriction(document, config.budget)
    then = "`watch` stops the run there" if restriction is None else restriction
    return f"{limit}; `submit` refuses more, and {then}"


def budget_restriction(document: dict[str, Any], budget: BudgetSection) -> str | None:
    """Return how the price restricts that `watch` stops a run at its budget; None if it is known.

    ``document`` is that of ``cost --json``. A price of which only a range is known counts at its
    upper end, so that a run may be stopped earlier.
    """
    unpriced = [
        stage for stage in document["stages"] if stage["price_per_instance_hour_usd"] is None
    ]
    if not unpriced:
        return None
    name = unpriced[0]["instance_type"]
    if any(stage["price_high_usd"] is None for stage in unpriced):
        return f"it cannot be enforced: the price of {name} is unknown"
    if budget.on_exceed == "warn":
        return None  # it stops nothing
    hourly = max(stage["price_high_usd"] * stage["instances"] for stage in unpriced)
    hours = format_duration(budget.usd / hourly * _SECONDS_PER_HOUR)
    return (
        f"`watch` may stop the run after {hours} already: only a range of the price of {name} is "
        f"known, and its upper end, {format_usd(hourly)} an hour for all instances, counts until "
        "SageMaker reports what it bills"
    )
