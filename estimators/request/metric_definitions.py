"""CloudWatch metrics of a job, which SageMaker extracts from the event lines in its log.

The regular expressions rely on the event writer putting ``kind`` before the fields; a test matches
each of them against a real event line.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types_boto3_sagemaker.type_defs import MetricDefinitionTypeDef

NAMESPACE = "/aws/sagemaker/TrainingJobs"
"""Namespace of all metrics of training jobs: SageMaker's own and those extracted from the log."""

_PREFIX = "sm_train:"
HEARTBEAT_METRIC = f"{_PREFIX}heartbeat_seconds_since_step"

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
    # Each node logs its own; CloudWatch keeps minimum, mean and maximum over the nodes.
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
"""Event kind → numeric fields. Step metrics carry no kind in their name."""


def metric_definitions() -> list[MetricDefinitionTypeDef]:
    """Return ``MetricDefinitions`` of a request: one for each field worth a graph."""
    return [
        {
            "Name": f"{_PREFIX}{field if kind == 'step' else f'{kind}_{field}'}",
            "Regex": rf'SMT \{{"kind": "{kind}",.* "{field}": {_NUMBER}',
        }
        for kind, fields in _FIELDS.items()
        for field in fields
    ]
