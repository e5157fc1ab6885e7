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

NODE_KEYS = (
    "gpu_utilization_mean",
    "gpu_temperature_max",
    "gpu_memory_used_max",
    "gpu_power_mean",
    "network_receive_bytes_per_second",
    "network_send_bytes_per_second",
    "read_bytes_per_second",
)
"""Fields of ``node`` events that are metrics, each by :func:`node_tag`."""

IMAGE_TAG = "samples"
"""The grid of an evaluation's images."""


def node_tag(node: int, key: str) -> str:
    """Return the metric of a ``node`` event's field."""
    return f"node {node}/{key}"


def event_scalars(event: Mapping[str, Any]) -> dict[str, float]:
    """Return the known numbers of a ``step``, ``eval`` or ``node`` event by metric."""
    if event["kind"] == "step":
        values = {tag: event[key] for key, tag in STEP_TAGS.items()}
    elif event["kind"] == "eval":
        values = {"validation/loss": event["loss"]}
        levels: Mapping[str, Any] = event.get("losses") or {}
        values |= {f"validation/loss at {level}": loss for level, loss in levels.items()}
    elif event["kind"] == "node":
        values = {node_tag(event["node"], key): event[key] for key in NODE_KEYS}
    else:
        values = {}
    return {tag: value for tag, value in values.items() if value is not None}
