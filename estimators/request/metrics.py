"""CloudWatch metrics of a job, read by SageMaker from the event lines on standard output.

The regular expressions rely on the order in which the event writer puts ``kind`` before the
fields; a test matches every one of them against a real event line.
"""

from __future__ import annotations

NAMESPACE = "/aws/sagemaker/TrainingJobs"
"""Of all metrics of training jobs, SageMaker's own and those that are read from lines."""

_NUMBER = r"(-?[0-9]+\.?[0-9]*(?:[eE][-+]?[0-9]+)?)"

_FIELDS = {
    "step": (
        "step",
        "loss",
        "learning_rate",
        "gradient_norm",
        "steps_per_second",
        "images_per_second",
        "data_wait_share",
        "mfu",
    ),
    "heartbeat": ("seconds_since_step",),
    "checkpoint": ("seconds", "bytes"),
    "eval": ("loss", "seconds"),
    # Each machine says its own; over machines CloudWatch keeps minimum, mean and maximum.
    "node": (
        "network_receive_bytes_per_second",
        "network_send_bytes_per_second",
        "efa_receive_bytes_per_second",
        "efa_send_bytes_per_second",
        "efa_drops",
        "efa_retransmits",
        "disk_read_bytes_per_second",
        "disk_write_bytes_per_second",
        "read_bytes_per_second",
        "nvlink_bytes_per_second",
        "gpu_utilization_mean",
        "gpu_utilization_min",
        "gpu_memory_used_max",
        "gpu_temperature_max",
        "gpu_clock_min",
        "gpu_power_mean",
        "gpu_ecc_uncorrected",
        "straggler_ratio",
        "data_wait_share_max",
    ),
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
