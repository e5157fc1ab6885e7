"""``sm-train diagnose``: why a job failed, and which rank failed first."""

from __future__ import annotations

from typing import Any

import click
from sm_train.toolkit.command_base.command import command as sm_train_command


@sm_train_command(
    "sm-train diagnose my-model",
    "sm-train diagnose my-model--512px-0002",
    "sm-train diagnose logs/",
    "sm-train diagnose local-runs/my-model",
)
@click.argument("targets", metavar="RUN|JOB|FILES...", nargs=-1, required=True)
@click.pass_obj
def command(options: dict[str, Any], targets: tuple[str, ...], as_json: bool) -> None:
    """Find out why a job failed: cause, first failing rank, evidence and suggested fix.

    FILES are the nodes' logs, one per node (.gz is supported), folders of logs, or a local run's
    folder. JOB is a training job: its log streams and its status are read from AWS. RUN, by its
    name or its run file, stands for its newest job.
    """
    from sm_train.toolkit.analysis.diagnose import diagnosis_view
    from sm_train.toolkit.analysis.diagnose.diagnose_target import diagnose_targets
    from sm_train.toolkit.terminal.console import write_json

    diagnosis = diagnose_targets(targets, options)
    if as_json:
        write_json(diagnosis_view.document(diagnosis))
    else:
        diagnosis_view.show(diagnosis)
