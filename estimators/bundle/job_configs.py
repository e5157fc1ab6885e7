"""Produce the job configuration of each stage: what the code in the cluster reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from sm_train.cost.estimate import Purchase, hourly_price
from sm_train.cost.prices import shipped_prices
from sm_train.entrypoints.job_interface.job_config import DataSource, ExpectedPerformance, JobConfig
from sm_train.estimators.config.schema import RunConfig
from sm_train.estimators.config.stage import StageSection


def job_configs(
    config: RunConfig,
    predicted_speeds: Mapping[str, float] | None = None,
    model_plan: str | None = None,
) -> dict[str, JobConfig]:
    """Return the configuration of each stage by name.

    ``predicted_speeds`` are the cost model's it/s of stages for which the run file states none, and
    ``model_plan`` the JSON of a custom preset's plan. All
    depends only on the run file and the tables that ship with sm-train, so the same run file gives
    the same bundle.
    """
    speeds = predicted_speeds or {}
    return {
        stage.name: _job_config(config, stage, speeds.get(stage.name), model_plan)
        for stage in config.stages
    }


def _job_config(
    config: RunConfig, stage: StageSection, predicted_speed: float | None, model_plan: str | None
) -> JobConfig:
    return JobConfig(
        run=config.name,
        license=config.model.license,
        entry=config.entry,
        entry_args=config.entry_args,
        backend=config.cluster.backend,
        data=replace(config.data.job_config(), sources=_sources(config, stage)),
        model=config.model.job_config(),
        stage=stage.job_config(),
        training=replace(config.training.job_config(), objective=config.objective_of(stage)),
        evaluation=config.evaluation.job_config(),
        checkpoint=config.checkpoint.job_config(),
        heartbeat=config.heartbeat.job_config(),
        alerts=config.alerts.job_config(),
        doctor=config.doctor.job_config(),
        expected=replace(
            _expected_performance(config, stage, predicted_speed), model_plan=model_plan
        ),
        trackers=config.trackers.job_config(),
    )


def _sources(config: RunConfig, stage: StageSection) -> tuple[DataSource, ...]:
    uris = {name: channel.uri or "" for name, channel in config.channels.items()}
    uris["train"] = config.data.uri
    return tuple(
        DataSource(
            source.channel,
            source.weight,
            config.data.pipe_of(uris[source.channel]),
            source.where or config.data.where,
        )
        for source in config.sources_of(stage)
    )


def _expected_performance(
    config: RunConfig, stage: StageSection, predicted_speed: float | None
) -> ExpectedPerformance:
    speed, source = stage.steps_per_second, "the run file states it"
    if speed is None or not stage.is_measured_here(config.cluster.instance_type):
        speed, source = predicted_speed, "not measured: the cost model predicts it"
    return ExpectedPerformance(
        instance_type=config.cluster.instance_type,
        steps_per_second=speed,
        speed_source=source if speed else None,
        usd_per_instance_hour=_usd_per_instance_hour(config),
    )


def _usd_per_instance_hour(config: RunConfig) -> float | None:
    """Return the price; None without a region, and for training plans, which are prepaid."""
    if config.region is None or config.cluster.capacity == "training-plan":
        return None
    purchase = Purchase(config.region, config.cluster.capacity)
    price = hourly_price(config.cluster.instance_type, purchase, shipped_prices())
    amount = price.usd_per_instance_hour
    return None if amount is None else float(amount)
