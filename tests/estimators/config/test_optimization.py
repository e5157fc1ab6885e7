"""What the run file accepts as optimizer and schedule, and what no image could run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from sm_train.estimators.bundle.bundle import job_requirements
from sm_train.estimators.config.load import RunFileError, load_run

from tests.support.run_documents import config, run, stage


def refused(folder: Path, **changes: Any) -> str:
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(run(**changes)))
    with pytest.raises(RunFileError) as error:
        load_run(path)
    return str(error.value)


def test_a_name_is_short_for_a_section() -> None:
    short = config(training={"optimizer": "muon", "lr_schedule": "cosine"}).training
    assert short.optimizer.name == "muon"
    assert short.lr_schedule.name == "cosine"
    written_out = config(
        training={"optimizer": {"name": "muon"}, "lr_schedule": {"name": "cosine"}}
    ).training
    assert short == written_out


@pytest.mark.parametrize(
    ("training", "message"),
    [
        ({"optimizer": "adam"}, "training.optimizer.name: 'adam' is not one of adamw, adamw8bit"),
        ({"optimizer": {"name": "Adam W"}}, "must be a name from the list"),
        ({"optimizer": {"name": "adafactor", "betas": [0.9, 0.99]}}, "betas: does not apply to"),
        ({"optimizer": {"betas": [0.9, 1.0]}}, "training.optimizer.betas[1]: 1.0: "),
        ({"optimizer": {"options": {"x": 1}}}, "options: are arguments of a module:function"),
        ({"lr_schedule": "cosin"}, "'cosin' is not one of constant, cosine, linear, wsd"),
        ({"lr_schedule": {"name": "cosine", "decay_fraction": 0.1}}, "does not apply to cosine"),
        ({"lr_schedule": {"final_factor": 0.1}}, "does not apply to constant"),
        ({"lr_schedule": {"name": "wsd", "decay_fraction": 0}}, "decay_fraction: 0: "),
        ({"objective": "huber"}, "training.objective: 'huber': must be a module:function"),
        ({"weight_decay": 0.1}, "training.weight_decay: unknown key"),
    ],
)
def test_mistakes_are_one_line(tmp_path: Path, training: dict[str, Any], message: str) -> None:
    text = refused(tmp_path, training=training)
    assert message in text
    assert len(text.splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "cluster", "message"),
    [
        ("muon", {"backend": "smddp"}, "needs PyTorch 2.9, and the job has 2.5.1; write name: "),
        ("muon", {"framework_version": "2.8.0"}, "needs PyTorch 2.9, and the job has 2.8.0"),
        ("adafactor", {"framework_version": "2.3.0"}, "needs PyTorch 2.5"),
        ("adamw8bit", {"framework_version": "2.3.0"}, "needs PyTorch 2.4"),
    ],
)
def test_what_the_images_pytorch_lacks_is_refused(
    tmp_path: Path, name: str, cluster: dict[str, Any], message: str
) -> None:
    text = refused(
        tmp_path,
        training={"optimizer": name},
        cluster={"instance_type": "ml.p4de.24xlarge"} | cluster,
    )
    assert f"training.optimizer.name: '{name}': {message}" in text


@pytest.mark.parametrize("name", ["muon", "adafactor", "torch.optim:Adafactor"])
def test_optimizers_of_whole_weights_are_refused_with_sharding(tmp_path: Path, name: str) -> None:
    stages = [stage("a"), stage("b", sharding="full_shard")]
    text = refused(tmp_path, training={"optimizer": name}, stages=stages)
    assert f"training.optimizer.name: '{name}': stage b: " in text
    assert "write sharding: none" in text
    config(training={"optimizer": "adamw8bit"}, stages=stages)


def test_bitsandbytes_is_installed_only_where_it_is_used() -> None:
    assert "bitsandbytes==" in job_requirements(config(training={"optimizer": "adamw8bit"}), None)
    assert "bitsandbytes" not in job_requirements(config(), None)
