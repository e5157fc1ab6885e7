"""What a checkpoint records of the settings of its training, and which of them may change.

The *target* is what the network learns: weights that were trained for one target mean nothing for
another. The *course* is how they are trained, which may change, but not unnoticed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from sm_train.entrypoints.checkpoints.checkpoint_files import CheckpointError
from sm_train.entrypoints.job_interface.checkpoint_layout import SETTINGS_FILE
from sm_train.entrypoints.job_interface.job_config import JobConfig, StageConfig
from sm_train.entrypoints.models.builder import ModelComponents
from sm_train.entrypoints.models.objectives import default_shift
from sm_train.entrypoints.sample_metadata.color_counts import recorded_color

Settings = Mapping[str, Any]

SETTINGS_VERSION = 2

_SECTION_NAMES = {"stage": "stages[]"}
"""Section of the job → its name in the run file, where they differ."""

COMPARED_ELSEWHERE = (
    *("model.prediction_type", "stages[].prediction_type", "model.zero_terminal_snr"),
    *("model.timestep_shift", "training.objective", "stages[].objective"),
    # As stages[].effective_batch_size.
    *("stages[].per_device_batch_size", "stages[].gradient_accumulation_steps"),
    "stages[].instances",
    # By the content of the tensors.
    *("model.components", "model.local_components"),
    # The sampler's state has the shards that it orders, and refuses or names others.
    *("data.uri", "data.local", "data.file_system", "data.index", "data.samples", "channels"),
    # As data.sources, which a job has for its stage.
    "stages[].sources",
)
"""Keys of the run file whose values, or what follows from them, are compared in another way."""

NOT_COURSE = (
    # Names, places and rights.
    *("name", "run", "region", "role", "bucket", "bucket_owners", "output_kms_key"),
    *("bucket_kms_keys", "tags", "code", "license", "model.license"),
    # A script's own loop, which saves what it needs.
    *("entry", "entry_args"),
    # Where and how the same steps are computed.
    *("cluster", "backend", "kubernetes", "slurm", "recovery", "budget", "expected"),
    *("stages[].sharding", "stages[].sharding_reason", "stages[].activation_checkpointing"),
    *("training.compile", "training.text_encoders", "training.decode_workers"),
    *("stages[].steps_per_second", "stages[].measured_on"),
    *("data.sharded", "data.pipe", "data.latents", "data.expiry"),
    # What is looked at, saved, or done about failures.
    *("evaluation", "checkpoint", "heartbeat", "alerts", "trackers", "doctor"),
    *("training.log_every", "training.max_nonfinite_steps", "training.max_nonfinite_share"),
    *("training.max_rollbacks", "data.max_bad_fraction", "data.validation"),
    *("data.local_validation", "model.accept_components"),
    # What a stage takes from the one before it, once.
    *("stages[].name", "stages[].init_from", "stages[].optimizer_state"),
)
"""Keys of the run file that do not change what the next steps do to the weights, beyond rounding.
Everything else is compared when a stage resumes."""

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
    """Return how the network is trained, as JSON can hold it, by the keys of the run file.

    These are all settings of the job but :data:`NOT_COURSE` and what :func:`target` has.
    """
    stage, training = config.stage, config.training
    settings = {
        key: value
        for key, value in _leaves(json.loads(json.dumps(asdict(config))))
        if not is_listed(key, (*NOT_COURSE, *COMPARED_ELSEWHERE))
    }
    settings["stages[].effective_batch_size"] = (
        stage.per_device_batch_size * stage.gradient_accumulation_steps * world_size
    )
    if training.lr_schedule.name == "constant":
        # Every other schedule is a function of the stage's length.
        settings.pop("stages[].max_steps")
    return settings


def _leaves(section: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested sections by their keys in the run file.

    A source's pipe is where its data come from, and not part of them. Of a preset's file it is a
    digest.
    """
    for name, value in section.items():
        key = f"{path}.{name}" if path else _SECTION_NAMES.get(name, name)
        if key == "data.sources":
            yield key, [{**source, "pipe": None} for source in value]
        elif key == "model.preset_content" and value is not None:
            canonical = json.dumps(json.loads(value), sort_keys=True)
            yield key, hashlib.sha256(canonical.encode()).hexdigest()[:16]
        elif isinstance(value, dict) and name != "options":
            yield from _leaves(value, key)
        else:
            yield key, value


def is_listed(key: str, keys: Iterable[str]) -> bool:
    """Return whether a key of the run file, or a section that it is in, is one of ``keys``."""
    return any(key == listed or key.startswith(f"{listed}.") for listed in keys)


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


def with_kept_color(config: JobConfig, folder: Path) -> JobConfig:
    """Return the job with the color policy that the weights in ``folder`` were trained with.

    A run that sees other colors from one step to the next would learn both.

    Raises:
        CheckpointError: the settings in the folder are missing or damaged.
    """
    course = read_settings(folder)["course"]
    kept = recorded_color(
        {
            name: course[f"data.{name}"]
            for name in vars(config.data.color)
            if f"data.{name}" in course
        }
    )
    return replace(config, data=replace(config.data, **vars(kept)))


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
    return f"{key.removeprefix('stages[].')} {_format(old)} → {_format(new)}"


def _format(value: object) -> str:
    if value is None:
        return "none"
    return value if isinstance(value, str) else json.dumps(value)
