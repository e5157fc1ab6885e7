"""The program of the CronJob that a manifest writes: checks a run once, from outside of its pods.

The bundle's packages are installed before what needs them is imported.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from sm_train.entrypoints.base.pip_install import PackageInstallError, install_job_packages
from sm_train.entrypoints.job_interface.node_description import NODE_VARIABLE, NodeDescription

_BUNDLE = Path(__file__).parents[3]


def main() -> int:
    """Print the alerts that were sent; return 1 if the check failed or an alert did not arrive."""
    description = NodeDescription.from_json(os.environ[NODE_VARIABLE])
    try:
        install_job_packages(_BUNDLE)
        from sm_train.entrypoints.clusters.watcher import watch_bundle

        report = watch_bundle(_BUNDLE, description, time.time())
    except (PackageInstallError, OSError) as error:
        print(f"error: {error}")
        return 1
    for warning in report.warnings:
        print(f"warning: {warning}")
    for delivery in report.deliveries:
        print(delivery.alert.text())
        for problem in delivery.problems:
            print(f"not delivered to {problem}")
    return 1 if any(delivery.problems for delivery in report.deliveries) else 0


if __name__ == "__main__":
    sys.exit(main())
