"""The table of platforms: each adapter is found by its name here, and imported by nobody else."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

from sm_train.toolkit.base.errors import UsageError
from sm_train.toolkit.base.wings import missing, optional_module
from sm_train.toolkit.platforms.placed_run import PlacedRun
from sm_train.toolkit.platforms.target import RunPlace, Target
from sm_train.toolkit.records.job_logs import JobLogs
from sm_train.toolkit.records.run_job import RunJob
from sm_train.toolkit.terminal.console import write_line

ADAPTERS = {
    "local": "sm_train.toolkit.platforms.local.local_folder_run",
    "node-records": "sm_train.toolkit.clusters.node_records.find_cluster_run",
    "sagemaker": "sm_train.toolkit.platforms.sagemaker.sagemaker_run",
}
"""Platform → the module with its ``ADAPTER``, in the order of the questions.

Adapters that read only this machine, or what the user named, come first. An installation may lack
that of clusters.
"""


class NoRunError(UsageError):
    """The platform has no such run; another may have it."""


class Adapter:
    """Finds the runs of a platform.

    ``options`` are the global ones of the command line. A caller that finds a run again and again
    adds ``sessions``, a dictionary in which an adapter keeps what is opened once.
    """

    def claim(self, path: Path) -> RunPlace | None:
        """Return the run that a path on this machine leads to; None if it is none of these."""
        del path
        return None

    def find(self, target: Target, options: dict[str, Any]) -> PlacedRun | None:
        """Return the run that ``target`` names; None if the platform cannot have it.

        Raises:
            NoRunError: the platform has no such run.
            UserError: whether it has the run cannot be read.
        """
        del target, options
        return None

    def find_related(
        self, target: Target, options: dict[str, Any], found: PlacedRun | None
    ) -> PlacedRun | None:
        """Return the run by what another platform knows of it; ``found`` is None if none does."""
        del target, options, found
        return None

    def logs_of_job(self, name: str, options: dict[str, Any]) -> JobLogs | None:
        """Return the logs of a job that no run is known of; None if there is no such job.

        Raises:
            UserError: its logs cannot be read.
        """
        del name, options
        return None

    def runs_in(self, place: str, options: dict[str, Any]) -> list[PlacedRun]:
        """Return the runs in a folder or a bucket.

        Raises:
            UserError: it cannot be read.
        """
        del place, options
        return []

    def jobs_since(self, since: datetime, options: dict[str, Any]) -> list[RunJob]:
        """Return the jobs of all runs of the account since a time, oldest first.

        Raises:
            UserError: they cannot be listed.
        """
        del since, options
        return []


def adapters() -> Iterator[Adapter]:
    """Import and yield the adapters in the order of the table."""
    for name in ADAPTERS.values():
        module = optional_module(name)
        if module is None:
            _report_missing(name)
        else:
            adapter: Adapter = module.ADAPTER
            yield adapter


@cache
def _report_missing(name: str) -> None:
    """Say once that the runs of a platform are not found."""
    write_line(f"warning: {missing(name)}; its runs are not found", err=True)


def claim(path: Path) -> RunPlace | None:
    """Return the run that a path on this machine leads to, on whichever platform; None without."""
    places = (adapter.claim(path) for adapter in adapters())
    return next((place for place in places if place is not None), None)
