"""Names of the metrics in trackers and in the exports of past jobs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

STEP_TAGS = {
    "loss": "train/loss",
    "learning_rate": "train/learning_rate",
    "gradient_norm": "train/gradient_norm",
    "steps_per_second": "speed/steps_per_second",
    "images_per_second": "speed/images_per_second",
    "data_wait_share": "speed/data_wait_share",
    "mfu": "speed/mfu",
}
"""Field of a ``step`` event → its metric."""

IMAGE_TAG = "samples"
"""The grid of an evaluation's images."""


def event_scalars(event: Mapping[str, Any]) -> dict[str, float]:
    """Return the known numbers of a ``step`` or ``eval`` event by metric."""
    if event["kind"] == "step":
        values = {tag: event[key] for key, tag in STEP_TAGS.items()}
    elif event["kind"] == "eval":
        values = {"validation/loss": event["loss"]}
        levels: Mapping[str, Any] = event.get("losses") or {}
        values |= {f"validation/loss at {level}": loss for level, loss in levels.items()}
    else:
        values = {}
    return {tag: value for tag, value in values.items() if value is not None}
