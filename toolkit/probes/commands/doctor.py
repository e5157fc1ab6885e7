"""``sm-train doctor``: examine a cluster's GPUs, network and files, and their effect on the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from sm_train.toolkit.command_base.command import command as sm_train_command
from sm_train.toolkit.command_base.options import RunFile, local_options


@sm_train_command(
    "sm-train doctor run.yaml --canary",
    "sm-train doctor run.yaml --stage 512px",
    "sm-train doctor run.yaml --local --nodes 2",
)
@click.argument("run", type=RunFile())
@click.option("--stage", metavar="S", help="Stage whose cluster is examined (default: the first).")
@click.option(
    "--canary",
    is_flag=True,
    help="Run two short jobs that train, stop and resume a tiny model on the run's route.",
)
@click.option(
    "--instance-type", metavar="T", help="--canary: instance type (default: the cheapest)."
)
@click.option(
    "--interval", metavar="T", default="15s", show_default=True, help="--canary: polling interval."
)
@click.option("--local", is_flag=True, help="Examine this computer, with emulated instances.")
@local_options
@click.option(
    "--output",
    metavar="FOLDER",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder of the local run, where --local stores the result (local-runs/NAME), or of the "
    "canary's report (canary-reports).",
)
@click.option("--dry-run", is_flag=True, help="Print the job's request and exit; use no network.")
@click.option("--yes", "-y", is_flag=True, help="Start without confirmation.")
@click.pass_obj
def command(options: dict[str, Any], /, interval: str, **parameters: Any) -> None:
    """Examine the cluster of RUN, locally with --local, otherwise in a short job of its own.

    Training jobs on several instances examine their cluster automatically (doctor.mode in the run
    file). Exit code 3: the cluster is unfit.

    With --canary, two small instances train a tiny model on the run's image, route, network, role
    and shards; the job is stopped after a checkpoint, and another one resumes from it. The report
    states what worked, with figures, and names neither account nor bucket. Exit code 3: a step did
    not work.
    """
    from sm_train.toolkit.probes.doctor.doctor_command import run_doctor
    from sm_train.toolkit.probes.doctor.doctor_options import DoctorOptions
    from sm_train.toolkit.terminal.formatting import parse_duration

    run_doctor(
        DoctorOptions(
            **{name: options[name] for name in ("region", "profile")},
            **parameters,
            poll_seconds=parse_duration("--interval", interval),
        )
    )
