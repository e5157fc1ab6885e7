"""Checks a manifest with the scheduler that will run it: partition limits, and its own dry run."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sm_train.estimators.config.schema import RunConfig
from sm_train.estimators.manifests.manifest import Manifest
from sm_train.estimators.manifests.slurm import default_minutes
from sm_train.toolkit.base.errors import UserError
from sm_train.toolkit.checks.finding import Check, Finding
from sm_train.toolkit.clusters.scheduler import has_scheduler, run_command
from sm_train.toolkit.clusters.staged_manifest import manifest_of

SCHEDULER_DRY_RUN = Check("scheduler-dry-run", ("error", "warning", "info"))
PARTITION_LIMITS = Check("partition-limits", ("error",))

_NO_NODES = "Requested node configuration is not available"
"""What sbatch --test-only says while nodes are down or drained, too; sbatch queues such a job."""

_UNLIMITED = ("UNLIMITED", "INFINITE", "NONE", "")
_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")


def findings_of_stages(config: RunConfig, folder: Path, target: str, region: str) -> list[Finding]:
    """Return what the scheduler of ``target`` finds in the manifests of all stages.

    ``folder`` is that of the run file.

    Raises:
        UserError: there is no manifest of a stage.
    """
    chosen: Any = target
    findings: list[Finding] = []
    for stage in config.stages:
        manifest, _ = manifest_of(config, folder, stage.name, chosen, region, None)
        findings += scheduler_findings(manifest, config, stage.instances)
    return list(dict.fromkeys(findings))


def scheduler_findings(manifest: Manifest, config: RunConfig, nodes: int) -> Iterator[Finding]:
    """Check a manifest for ``nodes`` nodes with the scheduler of this machine."""
    if not has_scheduler(manifest):
        yield SCHEDULER_DRY_RUN.found(
            "info",
            manifest.section,
            f"{manifest.program} is not on this machine: limits and dry run are not checked",
            "repeat the command where it is, such as on a login node",
        )
        return
    if manifest.has_partitions:
        try:
            limits = list(
                partition_findings(run_command("scontrol show partition --oneliner"), config, nodes)
            )
        except UserError as error:
            limits = [
                PARTITION_LIMITS.found(
                    "error", "slurm", str(error), "see whether slurmctld answers"
                )
            ]
        yield from limits
        if limits:
            return
    yield from _dry_run_findings(manifest)


def _dry_run_findings(manifest: Manifest) -> Iterator[Finding]:
    with tempfile.TemporaryDirectory(prefix="sm-train-") as folder:
        file = Path(folder) / manifest.name
        file.write_text(manifest.text)
        try:
            run_command(manifest.dry_run(str(file)))
        except UserError as error:
            message = str(error).replace(str(file), "MANIFEST")
            if _NO_NODES in message:
                yield SCHEDULER_DRY_RUN.found(
                    "warning",
                    manifest.section,
                    message,
                    "nodes that have it are down or drained, and the job waits for them; if there "
                    "are none, change slurm.options",
                )
                return
            yield SCHEDULER_DRY_RUN.found(
                "error",
                manifest.section,
                message,
                "change what it names, in the run file or on the cluster",
            )


def partition_findings(text: str, config: RunConfig, nodes: int) -> Iterator[Finding]:
    """Compare a job with its partition: sbatch accepts one that waits for ever.

    ``text`` is what `scontrol show partition --oneliner` prints.
    """
    options = config.slurm.options
    named, minutes = options.get("partition"), _asked_minutes(config)
    asked = str(options.get("nodes", ""))
    nodes = int(asked) if asked.isdecimal() else nodes
    partitions = _partitions(text)
    chosen = _chosen(partitions, named if isinstance(named, str) else None)
    if not chosen:
        yield PARTITION_LIMITS.found(
            "error",
            "slurm.options.partition",
            f"{named or 'no default partition'}: the cluster has {', '.join(sorted(partitions))}",
            "write one of them",
        )
        return
    # Of several partitions, one that takes the job is enough.
    problems = [list(_problems(name, chosen[name], minutes, nodes)) for name in chosen]
    if all(problems):
        yield from problems[0]


def _asked_minutes(config: RunConfig) -> float:
    """Return the time that a job asks for; 0 is the partition's own default."""
    time = config.slurm.options.get("time", str(default_minutes(config)))
    if not isinstance(time, str) or not (time in _UNLIMITED or _TIME.fullmatch(time)):
        return 0.0  # the partition's default, or one that sbatch refuses in the dry run
    minutes = _minutes(time)
    return float("inf") if minutes in (None, 0) else float(minutes or 0)


def _partitions(text: str) -> dict[str, Mapping[str, str]]:
    """Parse `scontrol show partition --oneliner`: name → fields."""
    found: dict[str, Mapping[str, str]] = {}
    for line in text.splitlines():
        fields = dict(word.partition("=")[::2] for word in line.split())
        found[fields.get("PartitionName", "")] = fields
    return found


def _chosen(
    partitions: Mapping[str, Mapping[str, str]], named: str | None
) -> dict[str, Mapping[str, str]]:
    names: Sequence[str] = (
        [name for name, fields in partitions.items() if fields.get("Default") == "YES"]
        if named is None
        else named.split(",")
    )
    return {name: partitions[name] for name in names if name in partitions}


def _problems(
    name: str, fields: Mapping[str, str], minutes: float, nodes: int
) -> Iterator[Finding]:
    if fields.get("State", "UP") != "UP":
        yield PARTITION_LIMITS.found(
            "error",
            "slurm.options.partition",
            f"{name}: is {fields['State']}",
            "choose another, or wait until it is up",
        )
    longest = _minutes(fields.get("MaxTime", ""))
    asked = "no limit" if minutes == float("inf") else f"{minutes:,.0f} minutes"
    if longest is not None and minutes > longest:
        yield PARTITION_LIMITS.found(
            "error",
            "slurm.options.time",
            f"{asked}: the partition {name} allows "
            f"{longest:,} minutes, and the job would wait for ever (PartitionConfig)",
            f'set slurm.options.time: "{longest}"; the script queues the job again after it',
        )
    fewest = fields.get("MinNodes", "")
    if fewest.isdecimal() and nodes < int(fewest):
        yield PARTITION_LIMITS.found(
            "error",
            "stages.instances",
            f"{nodes} nodes: the partition {name} has MinNodes {fewest}",
            "use more nodes, or another partition",
        )
    for key in ("MaxNodes", "TotalNodes"):
        most = fields.get(key, "")
        if most.isdecimal() and nodes > int(most):
            yield PARTITION_LIMITS.found(
                "error",
                "stages.instances",
                f"{nodes} nodes: the partition {name} has {key} {most}",
                "use fewer nodes, or another partition",
            )


def _minutes(text: str) -> int | None:
    """Parse Slurm's D-HH:MM:SS, HH:MM:SS, MM:SS or minutes; None if there is no limit."""
    found = _TIME.fullmatch(text)
    if text in _UNLIMITED or found is None:
        return None
    days, *parts = (int(part) if part else None for part in found.groups())
    numbers = [part for part in parts if part is not None]
    if days is not None:  # D-HH[:MM[:SS]]
        hours, minutes, seconds = (*numbers, 0, 0)[:3]
        return days * 1440 + hours * 60 + minutes + (seconds > 0)
    if len(numbers) == 1:
        return numbers[0]
    hours, minutes, seconds = ((0, *numbers) if len(numbers) == 2 else numbers)[:3]
    return hours * 60 + minutes + (seconds > 0)
