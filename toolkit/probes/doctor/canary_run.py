"""Derives a run's canary: the cheapest run that a job of it could fail to start, stop or resume.

The canary keeps what decides how SageMaker treats the job: region, role, bucket, network, keys,
image, route, environment and the run's own shards. The model is tiny, and two small instances train
it for minutes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from pydantic import ValidationError
from sm_train.cost.assumptions import Assumptions
from sm_train.cost.estimate import Purchase, hourly_price
from sm_train.cost.instances import UnknownInstanceTypeError, instance_type, instance_types
from sm_train.estimators.config.model import ModelSection
from sm_train.estimators.config.naming import canary_prefix
from sm_train.estimators.config.schema import RunConfig
from sm_train.estimators.config.stage import StageSection
from sm_train.estimators.request.images import image_uri
from sm_train.estimators.request.launch_plan import LaunchPlan, launch_plans
from sm_train.toolkit.base.errors import UserError
from sm_train.toolkit.planning.price_table import price_table
from sm_train.toolkit.probes.short_jobs.short_run import ShortRunPrice, short_run, short_run_price

STAGE = "canary"
STEPS_AFTER_RESTORE = 20
MAX_RUNTIME_SECONDS = 1800
"""Each of the two jobs ends after this at the latest, whatever happens to the laptop."""

_TRAINING_SECONDS = 180.0
"""Estimated time for the steps, the checkpoints and the stop of a job."""

_INSTANCES = 2
_RESOLUTION = 64
_MAX_STEPS = 20_000
"""Steps of the first job: more than it takes until its first checkpoint is stored."""

_TINY_PRESETS_BY_CLASS = {
    "UNet2DConditionModel": "tiny-sd2",
    "PixArtTransformer2DModel": "tiny-dit",
    "SD3Transformer2DModel": "tiny-mmdit",
}
_TINY_PRESETS = {"sdxl": "tiny-sdxl", "sd2": "tiny-sd2", "dit": "tiny-dit", "mmdit": "tiny-mmdit"}
"""The tiny preset of a family, by the beginning of its presets' names."""

_DROPPED = ("code", "entry", "channels")
"""Sections that take their defaults besides those of every short run: they are not part of the
route."""


@dataclass(frozen=True)
class Canary:
    """A canary of a run: its first job's run file, the run's route, and what it costs.

    ``price`` is that of both jobs together.
    """

    config: RunConfig
    run: str
    region: str
    launch: LaunchPlan
    price: ShortRunPrice

    @property
    def stage(self) -> StageSection:
        return self.config.stages[0]

    def resuming(self, step: int) -> RunConfig:
        """Return the second job's run file, which ends a few steps after ``step``."""
        stage = self.stage.model_copy(update={"max_steps": step + STEPS_AFTER_RESTORE})
        return self.config.model_copy(update={"stages": [stage]})


def derive_canary(
    config: RunConfig, stage: StageSection, region: str, now: datetime, instance: str | None = None
) -> Canary:
    """Return the canary of ``stage``, on the instance type ``instance`` or the cheapest one.

    Raises:
        UserError: no instance type starts by the stage's route, or ``instance`` does not.
    """
    [wanted] = _launches(config, [stage], region)
    name = f"{canary_prefix(config.name)}{now:%m%d%H%M%S}"
    if instance is not None:
        try:
            chosen = _canary_config(config, stage, name, instance)
        except ValidationError as error:
            reason = error.errors()[0]["msg"].removeprefix("Value error, ")
            raise UserError(f"--instance-type: {reason}") from None
        except UnknownInstanceTypeError as error:
            raise UserError(f"--instance-type: {error}") from None
        [launch] = _launches(chosen, chosen.stages, region)
        if launch.route != wanted.route:
            raise UserError(
                f"--instance-type: {instance} starts by {launch.route}, but {stage.name} by "
                f"{wanted.route}: the canary would not exercise it"
            )
    else:
        chosen, launch = _cheapest(config, stage, name, region, wanted)
    seconds = 2 * (Assumptions().start_up_seconds + config.doctor.timeout + _TRAINING_SECONDS)
    price = short_run_price(chosen, region, seconds=seconds, max_seconds=2 * MAX_RUNTIME_SECONDS)
    return Canary(chosen, config.name, region, launch, price)


def _cheapest(
    config: RunConfig, stage: StageSection, name: str, region: str, wanted: LaunchPlan
) -> tuple[RunConfig, LaunchPlan]:
    """Return the canary on the cheapest type with the stage's route, image and kind of network."""
    with_efa = instance_type(config.cluster.instance_type).supports_efa and stage.instances > 1
    priced = []
    for kind in instance_types():
        price = _hourly_usd(kind.name, region)
        # bf16 came with Ampere: the newest images no longer support all older GPUs.
        usable = kind.trains and kind.bf16_tflops is not None
        if price is not None and usable and kind.supports_efa == with_efa:
            priced.append((price, kind.name))
    for _, one_name in [*sorted(priced), (0.0, config.cluster.instance_type)]:
        try:
            candidate = _canary_config(config, stage, name, one_name)
            [launch] = _launches(candidate, candidate.stages, region)
        except (ValidationError, UserError):
            continue  # such as hybrid_shard on a single GPU
        if (launch.route, launch.image) == (wanted.route, wanted.image):
            return candidate, launch
    raise UserError(f"{stage.name}: no instance type starts by {wanted.route} in {region}")


def _launches(config: RunConfig, stages: list[StageSection], region: str) -> list[LaunchPlan]:
    try:
        image = image_uri(config, region)
    except ValueError as error:
        raise UserError(str(error)) from None
    plans = launch_plans(config, stages, image)
    return [plans[stage.name] for stage in stages]


def _hourly_usd(name: str, region: str) -> float | None:
    price = hourly_price(name, Purchase(region, "on-demand"), price_table())
    usd = price.usd_per_instance_hour
    return None if usd is None else float(usd)


def _canary_config(config: RunConfig, stage: StageSection, name: str, instance: str) -> RunConfig:
    document = short_run(config, stage).model_dump(mode="json")
    kept: dict[str, Any] = {key: document[key] for key in document if key not in _DROPPED}
    kept["name"] = name
    kept["data"] |= {"samples": None}
    kept["data"]["aspect_buckets"] = False
    kept["model"] |= {"preset": _tiny_preset(config.model), "preset_content": None}
    kept["model"] |= {"components": None, "local_components": None}
    kept["stages"] = [
        {
            "name": STAGE,
            "resolution": min(stage.resolution, _RESOLUTION),
            "instances": _INSTANCES,
            "per_device_batch_size": 2,
            "max_steps": _MAX_STEPS,
            "learning_rate": stage.learning_rate,
            "sharding": stage.sharding,
        }
    ]
    kept["training"] |= {"warmup_steps": 1, "log_every": 10}
    # A tiny model takes many steps a second: deleting its checkpoints would race with the upload.
    kept["checkpoint"] |= {"every_steps": 50, "keep_last": 100}
    kept["cluster"] |= {
        "instance_type": instance,
        "capacity": "on-demand",
        "training_plan": None,
        "max_runtime": MAX_RUNTIME_SECONDS,
        "max_wait": None,
        "max_pending": None,
        "volume_gb": min(config.cluster.volume_gb, 100),
    }
    if instance_type(instance).local_nvme_gb:
        kept["cluster"]["volume_kms_key"] = None  # SageMaker rejects it for types with NVMe
    kept["doctor"] |= {"mode": "warn"}
    return RunConfig.model_validate(kept)


def _tiny_preset(model: ModelSection) -> str:
    """Return the tiny preset of the same family; a preset without one is tiny already."""
    if model.preset_content is not None:
        network = json.loads(model.preset_content)["network"]
        if network.get("addition_embed_type"):
            return "tiny-sdxl"
        return _TINY_PRESETS_BY_CLASS[network["class"]]
    if model.preset is None:
        return "tiny-sd2"
    families = sorted(_TINY_PRESETS, key=len, reverse=True)
    return next(
        (_TINY_PRESETS[family] for family in families if model.preset.startswith(family)),
        model.preset,
    )
