"""Placements of a run: the run file's own cluster and region, and each of its fallbacks.

A placement holds a complete run file with the fallback applied. Code that takes a run file, such
as requests, bundles, prices and checks, therefore needs no knowledge of fallbacks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from sm_train.cost.instances import instance_type
from sm_train.estimators.config.consistency import Problem
from sm_train.estimators.config.naming import staging_bucket
from sm_train.estimators.config.recovery import FallbackSection, FallbackStageSection
from sm_train.estimators.config.schema import RunConfig
from sm_train.estimators.config.stage import StageSection

PLACEMENT_TAG = "sm-train:placement"
"""A job's tag: the number of its placement. Jobs at the home placement have none."""

_ECR_REGION = re.compile(r"(?<=\.dkr\.ecr\.)[a-z0-9-]+(?=\.amazonaws\.com)")


@dataclass(frozen=True)
class Placement:
    """A cluster and region for the run's jobs.

    ``number`` is 0 for the home placement, which the run file describes, and 1 for its first
    fallback. ``config`` is the run with the fallback applied. ``key`` is the key of the run file
    that defines the placement.
    """

    number: int
    config: RunConfig
    region: str
    key: str

    @property
    def bucket(self) -> str:
        """The bucket of code and checkpoints in ``region``."""
        return staging_bucket(self.config, self.region)

    def stage(self, name: str) -> StageSection:
        """Return the stage called ``name``."""
        [stage] = [stage for stage in self.config.stages if stage.name == name]
        return stage

    def cluster(self, stage: str) -> str:
        """Describe the cluster of ``stage``: ``2 × ml.p5.48xlarge in us-west-2``."""
        instances = self.stage(stage).instances
        return f"{instances} × {self.config.cluster.instance_type} in {self.region}"


def placements(config: RunConfig, region: str) -> tuple[Placement, ...]:
    """Return the home placement, in ``region``, and the fallbacks in their order."""
    return (
        Placement(0, config, region, "cluster.instance_type"),
        *(
            Placement(
                number, _relocated(config, fallback), fallback.region or region, _key(number - 1)
            )
            for number, fallback in enumerate(config.recovery.fallbacks, 1)
        ),
    )


def unique_placements(config: RunConfig, region: str) -> tuple[Placement, ...]:
    """Return each placement once for every instance type that a job there may get."""
    unique = []
    for placement in placements(config, region):
        first_type = placement.config.model_copy(
            update={"cluster": placement.config.cluster.model_copy(update={"alternatives": []})}
        )
        unique.append(Placement(placement.number, first_type, placement.region, placement.key))
        for name in placement.config.cluster.alternatives:
            alternative = _relocated(placement.config, FallbackSection(instance_type=name))
            key = "cluster.alternatives" if placement.number == 0 else placement.key
            unique.append(Placement(placement.number, alternative, placement.region, key))
    return tuple(unique)


def fallback_problems(config: RunConfig) -> list[Problem]:
    """Return what keeps the run from using its fallbacks; without them ``config`` is valid."""
    problems: list[Problem] = []
    for index, fallback in enumerate(config.recovery.fallbacks):
        path = ("recovery", "fallbacks", index)
        found = [*_regional_problems(config, fallback), *_batch_problems(config, fallback)]
        problems += [Problem((*path, *keys), None, message) for keys, message in found]
        if found:
            continue
        try:
            _relocated(config, fallback)
        except ValidationError as error:
            message = error.errors()[0]["msg"].removeprefix("Value error, ")
            problems.append(Problem(path, None, message))
    return problems


def _key(index: int) -> str:
    return f"recovery.fallbacks[{index}]"


def _changes_region(config: RunConfig, fallback: FallbackSection) -> bool:
    return fallback.region not in (None, config.region)


def _regional_problems(
    config: RunConfig, fallback: FallbackSection
) -> Iterator[tuple[tuple[str, ...], str]]:
    """Check that everything regional has a counterpart in another region."""
    if not _changes_region(config, fallback):
        return
    if config.region is None:
        yield ("region",), "needs region in the run file as well: the home region"
    missing = [name for name in _buckets(config) if name not in fallback.buckets]
    if missing:
        yield (
            ("buckets",),
            f"lacks {', '.join(missing)}: SageMaker reads and writes in the job's region only; "
            f"write {{{missing[0]}: BUCKET-IN-{fallback.region}}}",
        )
    for key in config.file_systems:
        yield ("region",), f"{key} belongs to one region; remove the fallback, or the file system"
    if config.cluster.vpc and fallback.vpc is None:
        yield ("vpc",), "is missing: subnets and security groups belong to one region"
    keys = {
        "output_kms_key": config.output_kms_key,
        "cluster.volume_kms_key": config.cluster.volume_kms_key,
    }
    for name, value in keys.items():
        # KMS developer guide, Multi-Region keys: related keys have one ID; ARNs differ.
        if value is not None and not value.startswith(("alias/", "mrk-")):
            yield (
                ("region",),
                f"{name} {value} is a key of one region; name it by an alias that both regions "
                "have, or by a multi-Region key's ID (mrk-…)",
            )


def _batch_problems(
    config: RunConfig, fallback: FallbackSection
) -> Iterator[tuple[tuple[str, ...], str]]:
    """Check that each stage keeps its effective batch size on the fallback's cluster."""
    known = {stage.name for stage in config.stages}
    for name in fallback.stages:
        if name not in known:
            yield ("stages", name), f"is not a stage of the run; it has {', '.join(sorted(known))}"
    fallback_type = fallback.instance_type or config.cluster.instance_type
    gpus_per_instance = instance_type(fallback_type).accelerators
    for stage in config.stages:
        gpus = stage.instances * instance_type(config.cluster.instance_type).accelerators
        overrides = fallback.stages.get(stage.name, FallbackStageSection())
        if overrides.instances is None and gpus % gpus_per_instance:
            yield (
                ("stages",),
                f"{stage.name} has {gpus} GPUs, which no number of {fallback_type} has "
                f"({gpus_per_instance} each); write {{{stage.name}: {{instances: N}}}}",
            )
            continue
        keys = _stage_keys(config, fallback, stage)
        batch = stage.per_device_batch_size * stage.gradient_accumulation_steps * gpus
        micro_batches = keys["per_device_batch_size"] * keys["instances"] * gpus_per_instance
        if micro_batches * keys["gradient_accumulation_steps"] != batch:
            yield (
                ("stages",),
                f"{stage.name} has an effective batch of {batch} images, which no accumulation of "
                f"{keys['per_device_batch_size']} × {keys['instances'] * gpus_per_instance} GPUs "
                "makes; write another per_device_batch_size or instances",
            )


def _stage_keys(
    config: RunConfig, fallback: FallbackSection, stage: StageSection
) -> dict[str, Any]:
    """Return the keys of ``stage`` that may differ at the fallback.

    Accumulation makes up for another number of GPUs, so the effective batch stays the same.
    """
    home_type = config.cluster.instance_type
    fallback_type = fallback.instance_type or home_type
    gpus = stage.instances * instance_type(home_type).accelerators
    gpus_per_instance = instance_type(fallback_type).accelerators
    overrides = fallback.stages.get(stage.name, FallbackStageSection())
    instances = overrides.instances or gpus // gpus_per_instance
    micro_batch = overrides.per_device_batch_size or stage.per_device_batch_size
    batch = stage.per_device_batch_size * stage.gradient_accumulation_steps * gpus
    return {
        "instances": instances,
        "per_device_batch_size": micro_batch,
        "gradient_accumulation_steps": batch // (micro_batch * instances * gpus_per_instance),
        # A speed belongs to the cluster that it was measured on.
        "measured_on": stage.measured_on_section(home_type).model_dump()
        if stage.steps_per_second
        else None,
    }


def _relocated(config: RunConfig, fallback: FallbackSection) -> RunConfig:
    """Return the run with ``fallback`` applied.

    Raises:
        ValidationError: the result is not a valid run file.
    """
    document = config.model_dump(mode="json")
    document["recovery"]["fallbacks"] = []
    for stage, keys in zip(config.stages, document["stages"], strict=True):
        keys.update(_stage_keys(config, fallback, stage))
    document["cluster"] = _cluster_keys(config, fallback, document["cluster"])
    if _changes_region(config, fallback):
        document["region"] = fallback.region
        _replace_buckets(document, fallback.buckets)
    return RunConfig.model_validate(document)


def _cluster_keys(
    config: RunConfig, fallback: FallbackSection, cluster: dict[str, Any]
) -> dict[str, Any]:
    capacity = fallback.capacity or config.cluster.capacity
    if fallback.capacity is None and capacity == "training-plan":
        capacity = "on-demand"  # a plan is for one type in one region
    cluster = cluster | {"capacity": capacity}
    for key, required_capacity in (
        ("keep_alive_period", "warm-pool"),
        ("training_plan", "training-plan"),
        ("max_wait", "spot"),
    ):
        if capacity != required_capacity:
            cluster[key] = None
    if fallback.instance_type not in (None, config.cluster.instance_type):
        cluster |= {"instance_type": fallback.instance_type, "alternatives": []}
    if capacity != "on-demand":
        cluster["alternatives"] = []
    if _changes_region(config, fallback):
        cluster["vpc"] = fallback.vpc and fallback.vpc.model_dump(mode="json")
        if cluster["image"] is not None:
            # Amazon ECR user guide, Private image replication: the same name in each region.
            cluster["image"] = _ECR_REGION.sub(fallback.region or "", cluster["image"])
    return cluster


def _buckets(config: RunConfig) -> list[str]:
    """Return the buckets that the run file names."""
    uris = (
        config.data.uri,
        config.data.validation,
        config.model.components,
        *(channel.uri for channel in config.channels.values()),
    )
    of_uris = [uri.split("/")[2] for uri in uris if uri is not None]
    return list(dict.fromkeys([*filter(None, [config.bucket]), *of_uris]))


def _replace_buckets(document: dict[str, Any], buckets: dict[str, str]) -> None:
    """Point every URI at the counterpart of its bucket; the keys stay the same."""
    document["bucket"] = buckets.get(document["bucket"], document["bucket"])
    for section, key in (
        (document["data"], "uri"),
        (document["data"], "validation"),
        (document["model"], "components"),
        *((channel, "uri") for channel in document["channels"].values()),
    ):
        if section[key] is not None:
            _, _, bucket, *rest = section[key].split("/")
            section[key] = "/".join(["s3:", "", buckets[bucket], *rest])
