"""What Slurm does with a run's jobs."""

from __future__ import annotations

from sm_train.entrypoints.job_interface.node_description import (
    FAILED_AFTER_PROGRESS,
    STOPPED,
    UNFIT_CLUSTER,
)
from sm_train.toolkit.clusters.node_records.record_phases import platform_of_nodes

# By the lines of the batch script (estimators/manifests/slurm.py).
PLATFORM = platform_of_nodes(
    "slurm", "Slurm", frozenset({FAILED_AFTER_PROGRESS, STOPPED, UNFIT_CLUSTER})
)
