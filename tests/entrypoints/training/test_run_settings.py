"""What a run file may change between two attempts of a stage, and between two stages."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml
from sm_train.entrypoints.job_interface.job_config import read_job_config
from sm_train.entrypoints.training.run_settings import (
    COMPARED_ELSEWHERE,
    NOT_COURSE,
    course,
    is_listed,
)
from sm_train.estimators.bundle.job_configs import job_configs
from sm_train.estimators.config.schema import RunConfig

from tests.conftest import Cli
from tests.support.cluster.training_jobs import Job, tiny_run, write_shards
from tests.toolkit.submit.local.submit_local_support import write_tiny

Event = dict[str, Any]


def job(folder: Path, **settings: Any) -> Job:
    prepared = Job(folder, tiny_run(**settings))
    write_shards(prepared.train_channel, shards=2, each=12)
    return prepared


def change(prepared: Job, changes: dict[str, dict[str, Any]]) -> None:
    """Change the bundle's configuration, as the next ``submit`` of an edited run file does."""
    file = prepared.bundle / "job.json"
    document = json.loads(file.read_text())
    for section, values in changes.items():
        document["8px"][section] |= values
    file.write_text(json.dumps(document))


def warnings(events: list[Event], code: str) -> list[str]:
    return [event["message"] for event in events if event.get("code") == code]


def test_resume_with_another_target_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    trained = job(tmp_path, max_steps=4, checkpoint_every=2)
    code, _, text = trained.run()
    assert code == 0, text
    scheduler = trained.checkpoints / "components" / "scheduler" / "scheduler_config.json"
    described = scheduler.read_bytes()
    configuration = (trained.bundle / "job.json").read_bytes()
    (trained.bundle / "losses.py").write_text(
        "def l1(prediction, target):\n"
        "    return (prediction - target.target).abs().mean(dim=(1, 2, 3))\n"
    )
    for section, key, new, old, shown in (
        ("model", "prediction_type", "epsilon", "v_prediction", "epsilon"),
        ("model", "zero_terminal_snr", True, "false", "true"),
        ("training", "objective", "losses:l1", "preset", "losses:l1"),
    ):
        (trained.bundle / "job.json").write_bytes(configuration)
        change(trained, {section: {key: new}, "stage": {"max_steps": 6}})
        shutil.rmtree(trained.base / "output", ignore_errors=True)
        assert trained.run()[0] == 1
        assert trained.failure.splitlines()[0] == (
            f"rank 0: CheckpointError: step-00000004: {key}: the checkpoint was trained with "
            f"{old}, and the run file now gives {shown}; restore the earlier value, or give the "
            "run another name to start over"
        )
        assert scheduler.read_bytes() == described
    (trained.bundle / "job.json").write_bytes(configuration)
    change(trained, {"stage": {"max_steps": 6}})
    assert trained.run()[0] == 0


@pytest.mark.integration
def test_a_run_keeps_the_color_policy_that_it_began_with(tmp_path: Path) -> None:
    trained = job(tmp_path, max_steps=2, checkpoint_every=1)
    change(trained, {"data": {"icc_profile": "ignore", "hdr": "keep"}})
    code, events, text = trained.run()
    assert code == 0, text
    assert warnings(events, "color-policy-kept") == []
    change(trained, {"stage": {"max_steps": 4}, "data": {"icc_profile": "srgb", "hdr": "reject"}})
    for steps in (4, 6):  # the second time from a checkpoint that the kept policy is written to
        change(trained, {"stage": {"max_steps": steps}})
        code, events, text = trained.run()
        assert code == 0, text
        assert warnings(events, "color-policy-kept") == [
            "the run began with icc_profile: ignore, hdr: keep and keeps it; the run file's "
            "icc_profile: srgb, hdr: reject applies to a run under another name"
        ]
        assert "icc_profile" not in "".join(warnings(events, "settings-changed"))


@pytest.mark.integration
def test_changed_course_is_one_warning_with_old_and_new_values(tmp_path: Path) -> None:
    settings = {"lr_schedule": "cosine", "checkpoint_every": 2}
    trained = job(tmp_path, max_steps=4, **settings)
    code, events, text = trained.run()
    assert code == 0, text
    assert warnings(events, "settings-changed") == []
    rates = {event["step"]: event["learning_rate"] for event in events if event["kind"] == "step"}
    # The first step trains at the full rate, and logs it.
    assert rates[1] == 1e-3
    assert 0 < rates[4] < rates[3] < rates[2] < rates[1]

    change(trained, {"stage": {"max_steps": 8, "per_device_batch_size": 2, "learning_rate": 5e-4}})
    code, events, text = trained.run()
    assert code == 0, text
    [message] = warnings(events, "settings-changed")
    assert message == (
        "since the checkpoint of step 4: max_steps 4 → 8; learning_rate 0.001 → 0.0005; "
        "effective_batch_size 4 → 2; learning rate of the next step 0 → 0.00025"
    )
    change(trained, {"stage": {"max_steps": 8}})
    _, events, _ = trained.run()
    assert warnings(events, "settings-changed") == []


@pytest.mark.integration
def test_other_data_resolution_and_precision_are_named_when_a_stage_resumes(tmp_path: Path) -> None:
    trained = job(tmp_path, max_steps=2, checkpoint_every=2)
    code, _, text = trained.run()
    assert code == 0, text
    change(
        trained,
        {
            "stage": {"max_steps": 4, "resolution": 16},
            "training": {"precision": "bf16", "log_every": 2},
            "data": {"flip": True, "crop": "random", "max_bad_fraction": 0.5},
            "checkpoint": {"every_steps": 1},
        },
    )
    code, events, text = trained.run()
    assert code == 0, text
    [message] = warnings(events, "settings-changed")
    assert message == (
        "since the checkpoint of step 2: data.crop center → random; data.flip false → true; "
        "resolution 8 → 16; training.precision fp32 → bf16"
    )


def run_file_keys(schema: dict[str, Any], definitions: dict[str, Any], path: str = "") -> list[str]:
    """Return the keys of the run file, with ``[]`` after the name of a list of sections."""
    keys = []
    for name, value in schema.get("properties", {}).items():
        key = f"{path}.{name}" if path else name
        sections = []
        for option in (value, *value.get("anyOf", ())):
            items = option.get("items") or {}
            for reference, suffix in ((option.get("$ref"), ""), (items.get("$ref"), "[]")):
                if reference is not None:
                    sections.append((definitions[reference.rpartition("/")[2]], suffix))
        for section, suffix in sections:
            keys += run_file_keys(section, definitions, key + suffix)
        keys += [] if sections else [key]
    return keys


def test_every_key_of_the_run_file_is_compared_or_listed(tmp_path: Path) -> None:
    """A new key that changes the course cannot be forgotten: a job compares all that it gets."""
    schema = RunConfig.model_json_schema()
    keys = run_file_keys(schema, schema["$defs"])
    config = tiny_run(max_steps=1, model={"lora": {}}, lr_schedule="cosine", preset="tiny-mmdit")
    file = tmp_path / "job.json"
    file.write_text(json.dumps({"8px": asdict(job_configs(config, {}, None)["8px"])}))
    compared = course(read_job_config(file, "8px"), 1)
    listed = (*NOT_COURSE, *COMPARED_ELSEWHERE)
    forgotten = [
        key
        for key in keys
        if not is_listed(key.replace("[].", ".").replace("stages.", "stages[]."), listed)
        and not is_listed(key.partition("[]")[0] if "sources[]" in key else key, compared)
    ]
    assert forgotten == []


def test_network_of_the_users_own_preset_is_compared(tmp_path: Path) -> None:
    """Another activation or number of heads changes no shape of the weights."""
    courses = []
    for activation, spaces in (("silu", 1), ("silu", 4), ("gelu", 1)):
        content = json.dumps({"network": {"act_fn": activation}}, indent=spaces)
        config = tiny_run(max_steps=1)
        document = asdict(job_configs(config, {}, None)["8px"])
        document["model"]["preset_content"] = content
        file = tmp_path / "job.json"
        file.write_text(json.dumps({"8px": document}))
        courses.append(course(read_job_config(file, "8px"), 1))
    assert courses[0] == courses[1] != courses[2]


@pytest.mark.slow
@pytest.mark.integration
def test_next_stage_learns_something_else_only_if_the_run_file_states_it(tmp_path: Path) -> None:
    first = job(tmp_path / "first", max_steps=2)
    code, _, text = first.run()
    assert code == 0, text
    second = job(tmp_path / "second", max_steps=1)
    shutil.copytree(first.checkpoints / "final", second.base / "input" / "data" / "previous")

    change(second, {"model": {"prediction_type": "epsilon"}})
    assert second.run()[0] == 1
    assert (
        "stage 8px: prediction_type: the previous stage was trained with v_prediction, and the run "
        "file now gives epsilon; write stages.prediction_type for this stage"
    ) in second.failure.splitlines()[0]
    change(second, {"model": {"prediction_type": None}, "stage": {"prediction_type": "epsilon"}})
    code, events, text = second.run()
    assert code == 0, text
    assert warnings(events, "target-changed") == [
        "since the previous stage: prediction_type v_prediction → epsilon"
    ]
    scheduler = second.checkpoints / "final" / "scheduler" / "scheduler_config.json"
    assert json.loads(scheduler.read_text())["prediction_type"] == "epsilon"

    third = job(tmp_path / "third", max_steps=1, model={"zero_terminal_snr": True})
    shutil.copytree(first.checkpoints / "final", third.base / "input" / "data" / "previous")
    code, events, text = third.run()
    assert code == 0, text
    assert warnings(events, "target-changed") == [
        "since the previous stage: zero_terminal_snr false → true"
    ]


@pytest.mark.slow
@pytest.mark.integration
def test_default_shift_of_a_flow_grows_with_the_resolution_unreported(tmp_path: Path) -> None:
    first = job(tmp_path / "first", max_steps=1, preset="tiny-mmdit", resolution=16)
    code, _, text = first.run()
    assert code == 0, text
    for shift, reported in ((None, []), (3.0, ["timestep_shift 0.0625 → 3.0"])):
        second = job(
            tmp_path / str(shift),
            max_steps=1,
            preset="tiny-mmdit",
            resolution=32,
            model={"timestep_shift": shift},
        )
        shutil.copytree(first.checkpoints / "final", second.base / "input" / "data" / "previous")
        code, events, text = second.run()
        assert code == 0, text
        expected = [f"since the previous stage: {change}" for change in reported]
        assert warnings(events, "target-changed") == expected


@pytest.mark.slow
@pytest.mark.integration
def test_local_run_shows_what_the_run_file_changed(cli: Cli, tmp_path: Path) -> None:
    write_shards(tmp_path / "shards", shards=1, each=20)
    run = write_tiny(tmp_path, max_steps=2)
    command = ["submit", run, "--local", "--nodes", "1"]
    first = cli(*command, network="loopback")
    assert first.returncode == 0, first.stderr
    document = yaml.safe_load(run.read_text())
    document["stages"][0] |= {"max_steps": 3, "learning_rate": 2e-3}
    run.write_text(yaml.safe_dump(document))
    second = cli(*command, network="loopback")
    assert second.returncode == 0, second.stderr
    assert "since the checkpoint of step 2: learning_rate 0.001 → 0.002" in second.stderr
