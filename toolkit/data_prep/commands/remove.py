"""``sm-train remove``: removes samples from a set of shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from sm_train.toolkit.command_base.command import command as sm_train_command
from sm_train.toolkit.command_base.options import RunFile


@sm_train_command(
    "sm-train remove packed/ 007.jpg",
    "sm-train remove s3://photos/ 000000042 000000043",
    "sm-train remove s3://photos/ --where \"contributor = 'ada'\"",
    "sm-train remove s3://photos/",
)
@click.argument("destination", metavar="DST")
@click.argument("names", metavar="[KEYS]...", nargs=-1)
@click.option(
    "--where",
    metavar="SQL",
    help="Remove the samples that fulfil this condition on columns of the index.",
)
@click.option(
    "--from",
    "listing",
    metavar="FILE",
    type=click.File("r", encoding="utf-8"),
    help="Text file with more KEYS, one on each line; - is standard input.",
)
@click.option(
    "--runs",
    metavar="PLACE",
    multiple=True,
    help="Where runs on Kubernetes and Slurm are: a bucket s3://BUCKET, a run in it "
    "s3://BUCKET/RUN, or a folder. Those that may read the old shards are respected. Repeat it "
    "for several.",
)
@click.option(
    "--ended",
    metavar="RUN",
    multiple=True,
    help="A run of --runs that has ended, although it has no final model. Repeat it for several.",
)
@click.option(
    "--for",
    "run",
    metavar="RUN",
    type=RunFile(),
    help="Run file: live jobs are looked for in the regions of its fallbacks, too.",
)
@click.option("--dry-run", is_flag=True, help="Show what would be removed.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@click.pass_obj
def command(
    options: dict[str, Any],
    destination: str,
    names: tuple[str, ...],
    where: str | None,
    listing: Any,
    runs: tuple[str, ...],
    ended: tuple[str, ...],
    run: Path | None,
    dry_run: bool,
    yes: bool,
    as_json: bool,
) -> int:
    """Remove samples from a set of shards, and never train on them again.

    DST is a pack, or a folder or S3 prefix of shards that has an index. KEYS are keys of samples,
    or the paths or addresses of their images as they were packed.

    The samples are listed next to the index first: jobs skip them from their next epoch or start
    on, and `sm-train pack --append` never adds their images again. Then their shards are rewritten
    under new names, the index switches to these, and the old shards are deleted unless a live job
    may read them. Keys of other samples do not change. Run the command without KEYS to finish an
    interrupted removal, or to delete old shards that were kept. The exit code is 3 while old shards
    remain.
    """
    from sm_train.entrypoints.base.signals import raise_on_signals
    from sm_train.entrypoints.storage.store import S3Access
    from sm_train.estimators.config.placement import placements
    from sm_train.toolkit.aws.session import resolve_region
    from sm_train.toolkit.base.errors import ExitCode, UsageError
    from sm_train.toolkit.data_prep.lineage.recorded_runs import stages_in
    from sm_train.toolkit.data_prep.lineage.shard_readers import recorded_jobs
    from sm_train.toolkit.data_prep.packing.shard_set import find_shard_set
    from sm_train.toolkit.data_prep.removal.removal_report import (
        plan_lines,
        removal_document,
        result_lines,
    )
    from sm_train.toolkit.data_prep.removal.remove_samples import plan_removal, remove_samples
    from sm_train.toolkit.run_file.run_file import load
    from sm_train.toolkit.terminal.confirmation import ask
    from sm_train.toolkit.terminal.console import bytes_bar, note, write_json, write_line

    wanted = [*names, *(line.strip() for line in listing or () if line.strip())]
    if wanted and where is not None:
        raise UsageError("--where: is given with KEYS; use one of them")
    access = S3Access(options["profile"], options["region"])
    shards = find_shard_set(destination, access)
    regions: tuple[str, ...] = ()
    if run is not None:
        config = load(run)
        home = resolve_region(options["region"], config.region, options["profile"])
        regions = tuple(placement.region for placement in placements(config, home))
    recorded = tuple(recorded_jobs(shards, stages_in(runs, access), ended))
    plan = plan_removal(shards, wanted, where)
    for line in plan_lines(plan):
        note(line)
    if plan.is_empty or dry_run:
        if as_json:
            write_json(removal_document(plan, None))
        return ExitCode.OK
    if not yes:
        ask("Remove them for good?" if plan.samples else "Finish the removal?")
    with raise_on_signals(), bytes_bar("rewriting") as progress:
        result = remove_samples(plan, progress, regions, recorded)
    for line in result_lines(plan, result):
        write_line(line, err=True)
    if as_json:
        write_json(removal_document(plan, result))
    return ExitCode.PREFLIGHT if result.kept else ExitCode.OK
