"""Phases of a job whose nodes store records: the records state them on every platform."""

from __future__ import annotations

from datetime import timedelta

from sm_train.toolkit.records.run_job import LOST, JobPhase, Platform, phase_table

_RECORDS = "records that the nodes store (clusters/node_record.py)"
_PHASES = phase_table(
    [
        JobPhase(
            "Starting",
            "prepares",
            is_billed=True,
            source=f"{_RECORDS}: packages and data are copied to the nodes",
            usual=timedelta(hours=1),
        ),
        JobPhase(
            "Training", "trains", is_billed=True, source=_RECORDS, usual=timedelta(minutes=30)
        ),
        *(
            JobPhase(name, "ended", is_billed=False, source=_RECORDS)
            for name in ("Completed", "Failed", "Stopped", LOST)
        ),
    ]
)


def platform_of_nodes(
    name: str, title: str, restarted_codes: frozenset[int] | None = None
) -> Platform:
    """Return the platform that starts the nodes again after ``restarted_codes``, or after any."""
    return Platform(
        name,
        title,
        _PHASES,
        log_delay=300.0,
        restarted_codes=restarted_codes,
        counted="seconds with heartbeats",
        own_retries="the platform's restarts",
        on_stop=" once its nodes have read the request",
    )
