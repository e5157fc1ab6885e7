"""What a checkpoint records of the settings of its training, and which of them may change.

The *target* is what the network learns: weights that were trained for one target mean nothing for
another. The *course* is how they are trained, which may change, but not unnoticed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sm_train.entrypoints.checkpointing.checkpoint_files import CheckpointError
from sm_train.entrypoints.common.checkpoint_layout import SETTINGS_FILE
from sm_train.entrypoints.common.job_config import JobConfig, StageConfig
from sm_train.entrypoints.models.builder import ModelComponents
from sm_train.entrypoints.models.objectives import default_shift

Settings = Mapping[str, Any]

SETTINGS_VERSION = 2

_STATED_PER_STAGE = ("prediction_type", "objective")
"""Parts of the target that a later stage changes only if the run file states them for it."""


def target(config: JobConfig, components: ModelComponents) -> dict[str, Any]:
    """Return what the network learns, as JSON can hold it."""
    objective = components.objective
    return {
        "prediction_type": objective.prediction_type,
        "objective": config.training.objective or "preset",
        **objective.noise_levels(),
        **components.latent_scale(),
    }


def course(config: JobConfig, world_size: int) -> dict[str, Any]:
    """Return how the network is trained, as JSON can hold it."""
    stage, training = config.stage, config.training
    schedule = training.lr_schedule
    batch = stage.per_device_batch_size * stage.gradient_accumulation_steps * world_size
    document = {
        "learning_rate": stage.learning_rate,
        "lr_schedule": {key: value for key, value in asdict(schedule).items() if value},
        "warmup_steps": training.warmup_steps,
        "effective_batch_size": batch,
        "optimizer": {key: value for key, value in asdict(training.optimizer).items() if value},
        "max_grad_norm": training.max_grad_norm,
        "min_snr_gamma": config.model.min_snr_gamma,
        "caption_dropout": training.caption_dropout,
        "offset_noise": training.offset_noise,
        "ema_decay": training.ema_decay,
        "ema_start": training.ema_start,
        "seed": training.seed,
    }
    if schedule.name != "constant":
        # Every other schedule is a function of the stage's length.
        document["max_steps"] = stage.max_steps
    # As it is read back: tuples are lists.
    result: dict[str, Any] = json.loads(json.dumps(document))
    return result


def settings_file(
    target: Settings,
    course: Settings,
    components: Mapping[str, str],
    resolution: int,
    next_rate: float,
) -> bytes:
    """Return the content of :data:`SETTINGS_FILE`.

    ``components`` are the identities of the frozen components. ``next_rate`` is the learning rate
    of the step after the checkpoint.
    """
    document = {
        "format": SETTINGS_VERSION,
        "target": dict(target),
        "components": dict(components),
        "course": dict(course),
        "resolution": resolution,
        "next_learning_rate": next_rate,
    }
    return json.dumps(document, indent=2).encode()


def read_settings(folder: Path) -> dict[str, Any]:
    """Read the settings that a checkpoint or a final model records.

    Raises:
        CheckpointError: they are missing or damaged.
    """
    try:
        document: dict[str, Any] = json.loads((folder / SETTINGS_FILE).read_bytes())
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder}: has no {SETTINGS_FILE}: another version wrote it; use that version, or "
            "train the stage again under another name"
        ) from None
    except ValueError:
        raise CheckpointError(f"{folder}: {SETTINGS_FILE} is damaged") from None
    found = document.get("format", 1)
    if found != SETTINGS_VERSION:
        raise CheckpointError(
            f"{folder}: {SETTINGS_FILE} has format {found}, this version reads "
            f"{SETTINGS_VERSION}; use the version that wrote it, or `sm-train submit` the stage "
            "under another name"
        )
    return document


def require_same_target(folder: Path, current: Settings) -> None:
    """Refuse to resume a stage from the checkpoint in ``folder`` with another target.

    Raises:
        CheckpointError: the target differs.
    """
    for key, old, new in _differences(read_settings(folder)["target"], current):
        raise CheckpointError(
            f"{folder.name}: {key}: the checkpoint was trained with {_format(old)}, and the run "
            f"file now gives {_format(new)}; restore the earlier value, or give the run another "
            "name to start over"
        )


def target_changes(folder: Path, current: Settings, stage: StageConfig) -> list[str]:
    """Return what differs between the target of the previous stage in ``folder`` and this one.

    The default shift of a flow, which grows with the resolution, is no change.

    Raises:
        CheckpointError: the run file does not state for the stage what it changes.
    """
    stored = read_settings(folder)
    changes = []
    for key, old, new in _differences(stored["target"], current):
        if key in _STATED_PER_STAGE and getattr(stage, key) is None:
            raise CheckpointError(
                f"stage {stage.name}: {key}: the previous stage was trained with {_format(old)}, "
                f"and the run file now gives {_format(new)}; write stages.{key} for this stage if "
                "it is meant to learn something else, or restore the earlier value"
            )
        is_default = old == default_shift(stored["resolution"]) and new == default_shift(
            stage.resolution
        )
        if key != "timestep_shift" or not is_default:
            changes.append(_describe(key, old, new))
    return changes


def course_changes(folder: Path, current: Settings, next_rate: float) -> list[str]:
    """Return what differs between the course of the checkpoint in ``folder`` and this job's.

    ``next_rate`` is the learning rate of the next step, which is named if the change moves it.
    """
    stored = read_settings(folder)
    changes = [_describe(*change) for change in _differences(stored["course"], current)]
    old_rate = stored["next_learning_rate"]
    if changes and old_rate != next_rate:
        changes.append(f"learning rate of the next step {old_rate:.3g} → {next_rate:.3g}")
    return changes


def _differences(stored: Settings, current: Settings) -> Iterator[tuple[str, Any, Any]]:
    """Yield key, stored and current value of each setting that differs; None where it is absent."""
    for key in dict.fromkeys([*stored, *current]):
        if stored.get(key) != current.get(key):
            yield key, stored.get(key), current.get(key)


def _describe(key: str, old: object, new: object) -> str:
    return f"{key} {_format(old)} → {_format(new)}"


def _format(value: object) -> str:
    if value is None:
        return "none"
    return value if isinstance(value, str) else json.dumps(value)
