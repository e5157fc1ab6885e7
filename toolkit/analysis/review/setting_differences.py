"""The settings of a job as flat text, and in which of them several jobs differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sm_train.estimators.config.schema import RunConfig
from sm_train.toolkit.records.job_logs import Event

_START_FIELDS = (
    "resolution instance_type nodes world_size per_device_batch_size gradient_accumulation_steps "
    "effective_batch_size max_steps parameters backend precision sharding "
    "activation_checkpointing compile channels_last input_kind"
).split()
"""Fields of the start event that describe the run."""

_IDENTITY = frozenset({"name", "stages"})
"""Keys of a run file in which every run differs, and those that :func:`_stage` replaces."""


def job_settings(config: RunConfig | None, stage: str | None, start: Event) -> dict[str, str]:
    """Return the run file's settings of the job's stage, or those of its start event without one.

    Keys are paths, as ``training.learning_rate`` and ``stage.resolution``.
    """
    if config is None:
        return {key: _text(start[key]) for key in _START_FIELDS if start.get(key) is not None}
    document = config.model_dump(mode="json")
    planned: dict[str, Any] = next(
        (planned_stage for planned_stage in document["stages"] if planned_stage["name"] == stage),
        {},
    )
    general = {key: value for key, value in document.items() if key not in _IDENTITY}
    own = {key: value for key, value in planned.items() if key != "name"}
    return dict(_flat({**general, "stage": own}, ""))


def differences(jobs: Sequence[Mapping[str, str]]) -> list[tuple[str, list[str | None]]]:
    """Return each setting in which ``jobs`` differ, with every job's value; None if it has none."""
    keys = dict.fromkeys(key for job in jobs for key in job)
    rows = [(key, [job.get(key) for job in jobs]) for key in keys]
    return [(key, values) for key, values in rows if len(set(values)) > 1]


def _flat(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flat(inner, f"{path}.{key}" if path else str(key))
    elif value is not None:
        yield path, _text(value)


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_text, value))
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:,}" if isinstance(value, int) and abs(value) >= 10_000 else str(value)
