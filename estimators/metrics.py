"""CloudWatch metrics of a job, read by SageMaker from the event lines on standard output.

The regular expressions rely on the order in which the event writer puts ``kind`` before the
fields; a test matches every one of them against a real event line.
"""

from __future__ import annotations

_NUMBER = r"(-?[0-9]+\.?[0-9]*(?:[eE][-+]?[0-9]+)?)"

_FIELDS = {
    "step": (
        "step",
        "loss",
        "learning_rate",
        "gradient_norm",
        "iterations_per_second",
        "images_per_second",
        "data_wait_share",
        "mfu",
    ),
    "heartbeat": ("seconds_since_step",),
    "checkpoint": ("seconds", "bytes"),
    "eval": ("loss", "seconds"),
}


def metric_definitions() -> list[dict[str, str]]:
    """``MetricDefinitions`` of a request: one for each number that is worth a graph."""
    return [
        {
            "Name": f"sm_train:{field if kind == 'step' else f'{kind}_{field}'}",
            "Regex": rf'SMT \{{"kind": "{kind}",.* "{field}": {_NUMBER}',
        }
        for kind, fields in _FIELDS.items()
        for field in fields
    ]
