"""From evidence to what others read: event lines, and a result beside the checkpoints."""

from __future__ import annotations

from typing import Any

from sm_train.entrypoints.common.events import EventLog
from sm_train.entrypoints.common.job_config import JobConfig
from sm_train.entrypoints.common.sagemaker_paths import SageMakerPaths
from sm_train.entrypoints.doctor.history import (
    FOLDER,
    VERSION,
    accused,
    earlier,
    keep,
    now,
    results,
)
from sm_train.entrypoints.doctor.measurements import ClusterMeasurements
from sm_train.entrypoints.doctor.verdict import DoctorVerdict, judge


def conclude(
    settings: JobConfig,
    evidence: ClusterMeasurements,
    directories: SageMakerPaths,
    events: EventLog,
) -> dict[str, Any]:
    """Judge, keep the result and say it; returns what every process needs of the verdict."""
    folders = [directories.checkpoints / FOLDER, directories.channel("previous") / FOLDER]
    verdict = judge(settings, evidence, earlier(results(folders)))
    document = result_document(settings, evidence, verdict)
    try:
        path: str | None = str(keep(folders[0], document))
    except OSError as error:
        path = None
        events.warn("doctor-not-kept", f"the doctor's result could not be kept: {error}")
    for one in verdict.findings:
        events.warn(
            f"doctor-{one.code}",
            f"{one.message}; {one.advice}",
            nodes=[evidence.name(node) for node in one.nodes],
        )
    prediction = verdict.prediction
    events.write(
        "doctor",
        f"doctor ({verdict.level}, {evidence.seconds:.0f} s): {verdict.sentence}",
        level=verdict.level,
        sentence=verdict.sentence,
        seconds=evidence.seconds,
        network_bytes_per_second=verdict.network,
        slowdown=prediction.slowdown if prediction else None,
        findings=[one.code for one in verdict.findings],
        parts={one.name: [one.measured, one.expected, one.unit] for one in verdict.parts},
        path=path,
    )
    return {"level": verdict.level, "sentence": verdict.sentence}


def result_document(
    settings: JobConfig, evidence: ClusterMeasurements, verdict: DoctorVerdict
) -> dict[str, Any]:
    """What is kept of one examination."""
    return {
        "version": VERSION,
        "time": now(),
        "run": settings.run,
        "stage": settings.stage.name,
        "network": verdict.network,
        "accused": accused(evidence, verdict.findings),
        "verdict": verdict.as_document(evidence),
        "evidence": evidence.as_document(),
    }
