"""A part of a run is measured and tried with the program that the whole run gets."""

from __future__ import annotations

from pathlib import Path

import pytest
from sm_train.estimators.config.schema import RunConfig
from sm_train.estimators.request.launch_plan import compile_choice, launch_plan, pytorch_version
from sm_train.toolkit.api import run as api_run
from sm_train.toolkit.api.run import Run, submission_of
from sm_train.toolkit.planning.measured_speeds import work_digest
from sm_train.toolkit.probes.measuring.measurement_plan import Sweep, plan_measurements

from tests.support.run_documents import stage
from tests.support.run_files import write_run

PRESETS = sorted((Path(api_run.__file__).parents[1] / "presets").glob("*.yaml"))


def program(config: RunConfig) -> tuple[object, ...]:
    """Return what all jobs of a run have in common, as requests and launchers read it."""
    training = config.training
    return (
        pytorch_version(config),
        config.cluster.backend,
        compile_choice(config).compiled,
        training.precision,
        training.reduce_dtype,
    )


def load(path: Path) -> RunConfig:
    return Run.load(path, region="us-east-1").config


@pytest.mark.slow
@pytest.mark.parametrize("preset", PRESETS, ids=lambda path: path.stem)
def test_measurements_run_the_program_of_the_run(preset: Path, tmp_path: Path) -> None:
    """On one instance there is no SMDDP: alone, its stage would get another image."""
    path = tmp_path / "run.yaml"
    path.write_text(preset.read_text())
    config = load(path)
    for planned_stage in config.stages:
        plan = plan_measurements(
            config,
            planned_stage,
            tmp_path,
            "us-east-1",
            instances=sorted({1, 2, planned_stage.instances}),
            steps=100,
            sweep=Sweep(),
            synthetic=True,
            max_runtime=None,
        )
        for planned in plan.measurements:
            assert program(planned.config) == program(config)
            own = launch_plan(planned.config, planned.stage, "image")
            whole = launch_plan(config, planned_stage, "image")
            assert own.framework_version == whole.framework_version
            assert work_digest(planned.config, planned.stage) == work_digest(config, planned_stage)


def test_one_instance_of_a_run_with_smddp_keeps_its_pytorch(tmp_path: Path) -> None:
    path = write_run(tmp_path, cluster={"instance_type": "ml.p4de.24xlarge", "backend": "smddp"})
    config = load(path)
    [stage] = config.stages
    [planned] = plan_measurements(
        config,
        stage,
        tmp_path,
        "us-east-1",
        instances=[1],
        steps=100,
        sweep=Sweep(),
        synthetic=True,
        max_runtime=None,
    ).measurements
    assert planned.config.cluster.framework_version == pytorch_version(config)
    assert planned.config.training.compile is False


def test_stage_that_is_submitted_alone_gets_the_image_of_the_run(tmp_path: Path) -> None:
    stages = [stage("256px", instances=1), stage("512px", instances=4)]
    cluster = {"instance_type": "ml.p4de.24xlarge", "backend": "smddp"}
    run = Run.load(write_run(tmp_path, cluster=cluster, stages=stages), region="us-east-1")
    images = {
        name: submission_of(run, name).requests[0]["AlgorithmSpecification"]["TrainingImage"]
        for name in ("256px", "512px")
    }
    assert images["256px"] == images["512px"]
    assert "pytorch-training:2.5.1" in images["256px"]
    assert submission_of(run, "256px").bundle.sha256 == submission_of(run, None).bundle.sha256
