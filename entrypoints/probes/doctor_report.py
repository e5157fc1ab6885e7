"""Reports a verdict: as events, and as a stored result next to the checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sm_train.entrypoints.base.sagemaker_paths import SageMakerPaths
from sm_train.entrypoints.job_interface.events import EventLog
from sm_train.entrypoints.job_interface.job_config import JobConfig
from sm_train.entrypoints.probes.doctor_history import flagged_nodes, parse_results
from sm_train.entrypoints.probes.findings import ClusterFinding
from sm_train.entrypoints.probes.measurements import ClusterMeasurements
from sm_train.entrypoints.probes.verdict import DoctorVerdict, judge
from sm_train.entrypoints.records.doctor_results import (
    FOLDER,
    VERSION,
    read_results,
    timestamp,
    write_result,
)


def report_transport(
    config: JobConfig, cluster: ClusterMeasurements, events: EventLog
) -> list[ClusterFinding]:
    """Log what is wrong with the transport between nodes; returns the findings.

    ``cluster`` needs only the sweeps and NCCL's logs, which exist long before the verdict.
    """
    found = [finding for finding in judge(config, cluster).findings if finding.is_transport]
    _warn(found, cluster, events)
    return found


def conclude(
    config: JobConfig,
    cluster: ClusterMeasurements,
    paths: SageMakerPaths,
    events: EventLog,
    *,
    reported: Sequence[ClusterFinding] = (),
) -> dict[str, Any]:
    """Judge, store and log the result; returns the part of the verdict that every rank needs.

    Findings of the codes and nodes of ``reported`` ones are stored and not logged again.
    """
    folders = [paths.checkpoints / FOLDER, paths.channel("previous") / FOLDER]
    verdict = judge(config, cluster, parse_results(read_results(folders)))
    document = result_document(config, cluster, verdict)
    try:
        path: str | None = str(write_result(folders[0], document))
    except OSError as error:
        path = None
        events.warn("doctor-not-kept", f"the doctor's result could not be written: {error}")
    known = {(finding.code, finding.nodes) for finding in reported}
    new = [finding for finding in verdict.findings if (finding.code, finding.nodes) not in known]
    _warn(new, cluster, events)
    prediction = verdict.prediction
    events.write(
        "doctor",
        f"doctor ({verdict.level}, {cluster.seconds:.0f} s): {verdict.sentence}",
        level=verdict.level,
        sentence=verdict.sentence,
        seconds=cluster.seconds,
        network_bytes_per_second=verdict.network,
        slowdown=prediction.slowdown if prediction else None,
        findings=[finding.code for finding in verdict.findings],
        parts={
            figure.name: [figure.measured, figure.expected, figure.unit]
            for figure in verdict.figures
        },
        path=path,
    )
    return {"level": verdict.level, "sentence": verdict.sentence}


def _warn(found: Sequence[ClusterFinding], cluster: ClusterMeasurements, events: EventLog) -> None:
    for finding in found:
        events.warn(
            f"doctor-{finding.code}",
            f"{finding.message}; {finding.advice}",
            nodes=[cluster.name(node) for node in finding.nodes],
        )


def result_document(
    config: JobConfig, cluster: ClusterMeasurements, verdict: DoctorVerdict
) -> dict[str, Any]:
    """Return what is stored of one examination."""
    return {
        "version": VERSION,
        "time": timestamp(),
        "run": config.run,
        "stage": config.stage.name,
        "network": verdict.network,
        "flagged_nodes": flagged_nodes(cluster, verdict.findings),
        "verdict": verdict.as_document(cluster),
        "measurements": cluster.as_document(),
    }
