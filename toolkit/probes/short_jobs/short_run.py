"""Derives a small run from a run, and prices it: for `measure`, the canary and the doctor's job."""

from __future__ import annotations

from dataclasses import dataclass

from sm_train.cost.estimate import Purchase, hourly_price, money
from sm_train.estimators.config.cluster import ClusterSection
from sm_train.estimators.config.operations import AlertsSection
from sm_train.estimators.config.recovery import RecoverySection
from sm_train.estimators.config.schema import RunConfig
from sm_train.estimators.config.stage import StageSection
from sm_train.estimators.config.trackers import TrackersSection
from sm_train.estimators.config.training import EvaluationSection
from sm_train.estimators.request.launch_plan import with_program_of
from sm_train.toolkit.planning.price_table import price_table


@dataclass(frozen=True)
class ShortRunPrice:
    """What the jobs of a short run cost together; None if the price is unknown.

    ``seconds`` are their estimated billed seconds, and ``max_usd`` is the cost at their time limit.
    """

    seconds: float
    usd: float | None
    max_usd: float | None


def short_run(config: RunConfig, stage: StageSection) -> RunConfig:
    """Return a run of ``stage`` alone that evaluates, alerts and restarts nothing.

    What decides how SageMaker treats its job stays: region, role, bucket, network, keys and image.
    So does the program, which follows from all stages: PyTorch, backend, compilation, precision.
    """
    config = with_program_of(config)
    return config.model_copy(
        update={
            "stages": [stage],
            "data": config.data.model_copy(update={"validation": None, "local_validation": None}),
            "evaluation": EvaluationSection(),
            "cluster": _on_one_type(config.cluster),
            "recovery": RecoverySection(),
            "alerts": AlertsSection(),
            "trackers": TrackersSection(),
            "budget": None,
        }
    )


def _on_one_type(cluster: ClusterSection) -> ClusterSection:
    """Return the cluster without alternatives, restarts or instances that stay billed."""
    changes: dict[str, object] = {"alternatives": [], "retries": 0, "keep_alive_period": None}
    if cluster.capacity == "warm-pool":
        changes["capacity"] = "on-demand"
    return cluster.model_copy(update=changes)


def with_time_limit(run: RunConfig, seconds: int) -> RunConfig:
    """Return the run with a limit after which SageMaker stops each of its jobs."""
    changes: dict[str, object] = {"max_runtime": seconds}
    if run.cluster.max_wait is not None:
        changes["max_wait"] = max(run.cluster.max_wait, seconds)
    return run.model_copy(update={"cluster": run.cluster.model_copy(update=changes)})


def short_run_price(
    run: RunConfig, region: str, *, seconds: float, max_seconds: float
) -> ShortRunPrice:
    """Return the price of a short run's jobs for ``seconds``, and for ``max_seconds`` at most."""
    purchase = Purchase(region, run.cluster.capacity)
    hourly = hourly_price(run.cluster.instance_type, purchase, price_table()).usd_per_instance_hour
    usd, max_usd = (
        None if amount is None else float(amount)
        for amount in (
            money(duration, run.stages[0].instances, hourly) for duration in (seconds, max_seconds)
        )
    )
    return ShortRunPrice(seconds, usd, max_usd)
