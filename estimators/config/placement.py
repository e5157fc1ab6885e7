"""The places where a run may train: the run file's own, and each of its fallbacks.

A place is a run file of its own, with what differs there put in. So whatever takes a run file,
requests, bundles, prices and checks, knows nothing of fallbacks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from sm_train.cost.instances import instance_type
from sm_train.estimators.config.consistency import Problem
from sm_train.estimators.config.fallback import FallbackSection, FallbackStageSection
from sm_train.estimators.config.naming import staging_bucket
from sm_train.estimators.config.schema import RunConfig
from sm_train.estimators.config.stage import StageSection

_ECR_REGION = re.compile(r"(?<=\.dkr\.ecr\.)[a-z0-9-]+(?=\.amazonaws\.com)")


@dataclass(frozen=True)
class Placement:
    """``number`` is 0 for the run file's own place, 1 for its first fallback; ``config`` is the run
    as it is there. ``where`` is the key of the run file that names the place.
    """

    number: int
    config: RunConfig
    region: str
    where: str

    @property
    def bucket(self) -> str:
        """Of code and checkpoints there."""
        return staging_bucket(self.config, self.region)

    def machines(self, stage: str) -> str:
        """The cluster of ``stage`` there, in words."""
        [count] = [one.instances for one in self.config.stages if one.name == stage]
        return f"{count} × {self.config.cluster.instance_type} in {self.region}"


def placements(config: RunConfig, region: str) -> tuple[Placement, ...]:
    """The run's own place, in ``region``, and its fallbacks in their order."""
    return (
        Placement(0, config, region, "cluster.instance_type"),
        *(
            Placement(number, _moved(config, one), one.region or region, _where(number - 1))
            for number, one in enumerate(config.recovery.fallbacks, 1)
        ),
    )


def unique_placements(config: RunConfig, region: str) -> tuple[Placement, ...]:
    """Every place once for each type of machines that a job of it may be given."""
    found = []
    for place in placements(config, region):
        first = place.config.model_copy(
            update={"cluster": place.config.cluster.model_copy(update={"alternatives": []})}
        )
        found.append(Placement(place.number, first, place.region, place.where))
        for name in place.config.cluster.alternatives:
            other = _moved(place.config, FallbackSection(instance_type=name))
            where = "cluster.alternatives" if place.number == 0 else place.where
            found.append(Placement(place.number, other, place.region, where))
    return tuple(found)


def fallback_problems(config: RunConfig) -> list[Problem]:
    """What keeps the run from going to a fallback; ``config`` is good without them."""
    problems: list[Problem] = []
    for index, fallback in enumerate(config.recovery.fallbacks):
        where = ("recovery", "fallbacks", index)
        found = [*_regional_problems(config, fallback), *_batch_problems(config, fallback)]
        problems += [Problem((*where, *path), None, message) for path, message in found]
        if found:
            continue
        try:
            _moved(config, fallback)
        except ValidationError as error:
            message = error.errors()[0]["msg"].removeprefix("Value error, ")
            problems.append(Problem(where, None, message))
    return problems


def _where(index: int) -> str:
    return f"recovery.fallbacks[{index}]"


def _elsewhere(config: RunConfig, fallback: FallbackSection) -> bool:
    return fallback.region not in (None, config.region)


def _regional_problems(
    config: RunConfig, fallback: FallbackSection
) -> Iterator[tuple[tuple[str, ...], str]]:
    """What another region asks for: things of a region have no meaning in another."""
    if not _elsewhere(config, fallback):
        return
    if config.region is None:
        yield ("region",), "needs region in the run file, too: the run's own place"
    missing = [name for name in _buckets(config) if name not in fallback.buckets]
    if missing:
        yield (
            ("buckets",),
            f"lacks {', '.join(missing)}: SageMaker reads and writes in the job's region only; "
            f"write {{{missing[0]}: BUCKET-IN-{fallback.region}}}",
        )
    if config.cluster.vpc and fallback.vpc is None:
        yield ("vpc",), "is missing: subnets and security groups are of one region"
    named = {
        "output_kms_key": config.output_kms_key,
        "cluster.volume_kms_key": config.cluster.volume_kms_key,
    }
    for key, value in named.items():
        # KMS developer guide, Multi-Region keys: related keys have one id; ARNs differ.
        if value is not None and not value.startswith(("alias/", "mrk-")):
            yield (
                ("region",),
                f"{key} {value} is a key of one region; name it by an alias that both regions "
                "have, or by a multi-Region key's id (mrk-…)",
            )


def _batch_problems(
    config: RunConfig, fallback: FallbackSection
) -> Iterator[tuple[tuple[str, ...], str]]:
    """The effective batch is the run's: a place that cannot have it is none."""
    known = {stage.name for stage in config.stages}
    for name in fallback.stages:
        if name not in known:
            yield ("stages", name), f"is no stage of the run; it has {', '.join(sorted(known))}"
    machine = fallback.instance_type or config.cluster.instance_type
    each = instance_type(machine).accelerators
    for stage in config.stages:
        gpus = stage.instances * instance_type(config.cluster.instance_type).accelerators
        own = fallback.stages.get(stage.name, FallbackStageSection())
        if own.instances is None and gpus % each:
            yield (
                ("stages",),
                f"{stage.name} has {gpus} GPUs, which no number of {machine} has ({each} each); "
                f"write {{{stage.name}: {{instances: N}}}}",
            )
            continue
        there = _stage(config, fallback, stage)
        whole = stage.per_device_batch_size * stage.gradient_accumulation_steps * gpus
        step = there["per_device_batch_size"] * there["instances"] * each
        if step * there["gradient_accumulation_steps"] != whole:
            yield (
                ("stages",),
                f"{stage.name} learns from {whole} images a step, which no accumulation makes of "
                f"{there['per_device_batch_size']} × {there['instances'] * each} GPUs; write "
                f"another "
                "per_device_batch_size or instances",
            )


def _stage(config: RunConfig, fallback: FallbackSection, stage: StageSection) -> dict[str, Any]:
    """The keys of ``stage`` that are others there."""
    here = config.cluster.instance_type
    machine = fallback.instance_type or here
    gpus = stage.instances * instance_type(here).accelerators
    each = instance_type(machine).accelerators
    own = fallback.stages.get(stage.name, FallbackStageSection())
    instances = own.instances or gpus // each
    batch = own.per_device_batch_size or stage.per_device_batch_size
    same = (machine, instances, batch) == (here, stage.instances, stage.per_device_batch_size)
    whole = stage.per_device_batch_size * stage.gradient_accumulation_steps * gpus
    return {
        "instances": instances,
        "per_device_batch_size": batch,
        "gradient_accumulation_steps": whole // (batch * instances * each),
        # Measured on other machines, it would price these wrongly.
        "steps_per_second": stage.steps_per_second if same else None,
    }


def _moved(config: RunConfig, fallback: FallbackSection) -> RunConfig:
    """The run as it is at ``fallback``.

    Raises:
        ValidationError: the run file could not say so.
    """
    document = config.model_dump(mode="json")
    document["recovery"]["fallbacks"] = []
    for stage, keys in zip(config.stages, document["stages"], strict=True):
        keys.update(_stage(config, fallback, stage))
    document["cluster"] = _cluster(config, fallback, document["cluster"])
    if _elsewhere(config, fallback):
        document["region"] = fallback.region
        _replace_buckets(document, fallback.buckets)
    return RunConfig.model_validate(document)


def _cluster(
    config: RunConfig, fallback: FallbackSection, cluster: dict[str, Any]
) -> dict[str, Any]:
    capacity = fallback.capacity or config.cluster.capacity
    if fallback.capacity is None and capacity == "training-plan":
        capacity = "on-demand"  # a plan is for one type in one region
    cluster = cluster | {"capacity": capacity}
    for key, kind in (
        ("keep_alive_period", "warm-pool"),
        ("training_plan", "training-plan"),
        ("max_wait", "spot"),
    ):
        if capacity != kind:
            cluster[key] = None
    if fallback.instance_type not in (None, config.cluster.instance_type):
        cluster |= {"instance_type": fallback.instance_type, "alternatives": []}
    if capacity != "on-demand":
        cluster["alternatives"] = []
    if _elsewhere(config, fallback):
        cluster["vpc"] = fallback.vpc and fallback.vpc.model_dump(mode="json")
        if cluster["image"] is not None:
            # Amazon ECR user guide, Private image replication: the same name in each region.
            cluster["image"] = _ECR_REGION.sub(fallback.region or "", cluster["image"])
    return cluster


def _buckets(config: RunConfig) -> list[str]:
    """The buckets that the run file names."""
    named = (
        config.data.uri,
        config.data.validation,
        config.model.components,
        *(one.uri for one in config.channels.values()),
    )
    of_uris = [uri.split("/")[2] for uri in named if uri is not None]
    return list(dict.fromkeys([*filter(None, [config.bucket]), *of_uris]))


def _replace_buckets(document: dict[str, Any], buckets: dict[str, str]) -> None:
    """Point every address at the bucket that stands for its own; keys stay as they are."""
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
