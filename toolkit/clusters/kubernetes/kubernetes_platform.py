"""What Kubernetes does with a run's jobs."""

from __future__ import annotations

from sm_train.toolkit.clusters.node_records.record_phases import platform_of_nodes

PLATFORM = platform_of_nodes("kubernetes", "Kubernetes")
