"""Shows what a canary runs and costs, asks, runs it and writes its report."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path

from sm_train.entrypoints.base.atomic_write import write_atomic
from sm_train.estimators.config.schema import RunConfig
from sm_train.estimators.config.stage import StageSection
from sm_train.toolkit.base.errors import ExitCode, UserError
from sm_train.toolkit.probes.doctor.canary import CanaryPlatform, run_canary
from sm_train.toolkit.probes.doctor.canary_platforms import LocalPlatform, SageMakerPlatform
from sm_train.toolkit.probes.doctor.canary_report import (
    CanaryDocument,
    PlatformName,
    canary_document,
    is_confirmed,
    to_markdown,
)
from sm_train.toolkit.probes.doctor.canary_run import MAX_RUNTIME_SECONDS, Canary, derive_canary
from sm_train.toolkit.probes.doctor.doctor_options import DoctorOptions
from sm_train.toolkit.probes.short_jobs.short_job import ShortJobs, confirm
from sm_train.toolkit.submit.run_bundle import bundle_of
from sm_train.toolkit.submit.submission import prepare
from sm_train.toolkit.terminal.console import note, write_json, write_line
from sm_train.toolkit.terminal.formatting import format_duration, format_usd

_REPORTS = Path("canary-reports")
_LOCAL_NODES = 2


def start_canary(
    config: RunConfig, stage: StageSection, region: str, options: DoctorOptions
) -> None:
    """Run the canary of ``stage`` and write its report.

    Raises:
        UserError: it cannot start, the user did not confirm, or a step did not work (exit code 3).
    """
    base, output = options.run.parent, options.output or _REPORTS
    nodes = (options.nodes or _LOCAL_NODES) if options.local else None
    canary = derive_canary(config, stage, region, datetime.now(), options.instance_type)
    if options.dry_run:
        if nodes is None:
            write_line(_price_line(canary), err=True)
        bundle = bundle_of(canary.config, base)
        submission = prepare(canary.config, None, bundle, region, datetime.now())
        write_json(
            {
                "requests": list(submission.requests),
                "billable_seconds": canary.price.seconds,
                "cost_usd": canary.price.usd,
                "max_cost_usd": canary.price.max_usd,
            }
        )
        return
    if nodes is None:
        jobs = ShortJobs.open(canary.config, base, region, options.profile)
        confirm(_price_line(canary), yes=options.yes)
        platform: CanaryPlatform = SageMakerPlatform(jobs)
    else:
        platform = LocalPlatform(
            base=base,
            nodes=nodes,
            processes=options.processes,
            output=output / canary.config.name,
        )
    result = run_canary(platform, canary, _report, options.poll_seconds)
    name: PlatformName = "sagemaker" if nodes is None else "local"
    document = canary_document(canary, result, name, nodes or canary.stage.instances)
    _finish(document, output / canary.config.name, as_json=options.as_json)


def _report(line: str) -> None:
    write_line(line, err=True)


def _price_line(canary: Canary) -> str:
    cluster, stage = canary.config.cluster, canary.stage
    return (
        f"{canary.config.name}: two jobs on {stage.instances} × {cluster.instance_type} in "
        f"{canary.region}, by {canary.launch.route}, together about "
        f"{format_duration(canary.price.seconds)}: {format_usd(canary.price.usd)}; at most "
        f"{format_usd(canary.price.max_usd)}, since each ends after "
        f"{format_duration(MAX_RUNTIME_SECONDS)}"
    )


def _finish(document: CanaryDocument, file: Path, *, as_json: bool) -> None:
    """Write the report to ``file`` with two suffixes, and print it."""
    report = to_markdown(document)
    file.parent.mkdir(parents=True, exist_ok=True)
    path = file.with_name(f"{file.name}.md")
    write_atomic(path, report.encode())
    write_atomic(path.with_suffix(".json"), (json.dumps(document, indent=1) + "\n").encode())
    if as_json:
        write_json(document)
    else:
        write_line(report)
    note(f"report: {path} and {path.with_suffix('.json').name}")
    if not is_confirmed(document):
        states = [
            f"{fact['code']} {fact['state']}"
            for fact in document["facts"]
            if fact["state"] != "confirmed"
        ]
        raise UserError(f"not confirmed: {', '.join(states)}", ExitCode.PREFLIGHT)
