"""Runs the doctor alone on emulated nodes of this computer."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sm_train.entrypoints.records.doctor_results import FOLDER, read_results
from sm_train.estimators.config.schema import RunConfig
from sm_train.estimators.config.stage import StageSection
from sm_train.toolkit.base.errors import ExitCode, UserError
from sm_train.toolkit.submit.run_bundle import bundle_of

if TYPE_CHECKING:
    from rich.console import Console


def examine_local(
    config: RunConfig,
    stage: StageSection,
    *,
    base: Path,
    nodes: int,
    processes: int,
    output: Path,
    console: Console,
) -> dict[str, Any]:
    """Run the doctor on emulated nodes; returns the result that it stored in the run's folder.

    Only the result is added to that folder: training may be running in it.

    Raises:
        UserError: the doctor cannot start, or stored no result.
    """
    from sm_train.toolkit.submit.local.launcher import exclusive_run, run_stage

    single_stage = config.model_copy(update={"stages": [stage]})  # needs no earlier stage
    checkpoints = output / stage.name / "checkpoints"
    checkpoints.mkdir(parents=True, exist_ok=True)
    before = len(read_results([checkpoints / FOLDER]))
    with tempfile.TemporaryDirectory(prefix="doctor-") as folder:
        root = Path(folder) / stage.name
        root.mkdir()
        (root / "checkpoints").symlink_to(checkpoints.absolute())
        with exclusive_run(Path(folder)):
            run_stage(
                single_stage,
                stage,
                bundle_of(single_stage, base),
                base=base,
                nodes=nodes,
                processes=processes,
                output=Path(folder),
                console=console,
                options=("--doctor-only", "true"),
            )
    stored = read_results([checkpoints / FOLDER])
    if len(stored) == before:
        raise UserError(
            f"--local: the doctor stored no result in {checkpoints / FOLDER}; see its output above",
            ExitCode.JOB_FAILED,
        )
    return stored[-1]
