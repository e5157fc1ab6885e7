"""The run file: good ones are read, bad ones are told everything that is wrong, line by line."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from sm_train.estimators.run_config import RunConfig
from sm_train.estimators.run_file import RunFileError, load_run

GOOD = """\
name: demo
region: us-east-1
role: arn:aws:iam::111122223333:role/sm-train
data:
  uri: s3://my-bucket/shards/
model:
  preset: sd2
stages:
  - name: 256px
    resolution: 256
    instances: 4
    per_gpu_batch: 8
    accumulation: 2
    iterations: 1000
    learning_rate: 1e-4
cluster:
  instance_type: ml.p4de.24xlarge
"""


def read(tmp_path: Path, text: str) -> RunConfig:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return load_run(path)


def complaints(tmp_path: Path, text: str) -> list[str]:
    with pytest.raises(RunFileError) as caught:
        read(tmp_path, text)
    return [line.removeprefix(f"{tmp_path}/") for line in str(caught.value).splitlines()]


def test_a_good_file_is_read_with_its_defaults(tmp_path: Path) -> None:
    config = read(tmp_path, GOOD)
    assert config.stages[0].learning_rate == 1e-4
    assert config.cluster.retries == 3
    assert config.cluster.max_runtime == 5 * 86400


@pytest.mark.parametrize(
    ("written", "seconds"), [("90s", 90), ("30m", 1800), ("36h", 129600), ("2d", 172800), (77, 77)]
)
def test_durations_are_read_as_seconds(tmp_path: Path, written: object, seconds: int) -> None:
    config = read(tmp_path, GOOD + f"  max_runtime: {written}\n")
    assert config.cluster.max_runtime == seconds


CASES = {
    "unknown key": (
        GOOD.replace("    instances: 4", "    instances: 4\n    per_gpu_bach: 1"),
        ["run.yaml:12: stages[0].per_gpu_bach: unknown key; did you mean per_gpu_batch?"],
    ),
    "unknown section": (
        GOOD + "chekpoint: {every: 1}\n",
        ["run.yaml:18: chekpoint: unknown key; did you mean checkpoint?"],
    ),
    "zero instances": (
        GOOD.replace("instances: 4", "instances: 0"),
        ["run.yaml:11: stages[0].instances: 0: must be greater than or equal to 1"],
    ),
    "batch that does not divide": (
        GOOD.replace("    accumulation: 2", "    effective_batch_size: 2048\n    accumulation: 2"),
        [
            "run.yaml:13: stages[0].effective_batch_size: 2048: does not multiply out: "
            "8 per GPU × 2 accumulation × 32 GPUs = 512; write accumulation: 8"
        ],
    ),
    "batch that no accumulation makes": (
        GOOD.replace("    accumulation: 2", "    effective_batch_size: 100"),
        [
            "run.yaml:13: stages[0].effective_batch_size: 100: does not multiply out: "
            "8 per GPU × 1 accumulation × 32 GPUs = 256; no accumulation makes 100 of 8 × 32 GPUs"
        ],
    ),
    "unknown instance type": (
        GOOD.replace("ml.p4de.24xlarge", "ml.p4de.24xlage"),
        ["run.yaml:17: cluster.instance_type:"],
    ),
    "p5 with smddp": (
        GOOD.replace("ml.p4de.24xlarge", "ml.p5.48xlarge") + "  collective: smddp\n",
        ["run.yaml:18: cluster.collective: smddp does not run on ml.p5.48xlarge"],
    ),
    "a single object": (
        GOOD.replace("s3://my-bucket/shards/", "s3://my-bucket/shards/a.tar"),
        ["run.yaml:5: data.uri: s3://my-bucket/shards/a.tar is a single object"],
    ),
    "a quote in a value": (
        GOOD + "  environment: {GREETING: it's}\n",
        ['run.yaml:18: cluster.environment.GREETING: "it\'s": must be without quotes'],
    ),
    "a line end in a value": (
        GOOD + '  environment: {GREETING: "a\\nb"}\n',
        ["run.yaml:18: cluster.environment.GREETING: 'a\\nb': must be without quotes"],
    ),
    "illegal job name": (
        GOOD.replace("name: demo", "name: my_demo"),
        ["run.yaml:1: name: 'my_demo': must be letters and digits with single hyphens between"],
    ),
    "job name too long": (
        GOOD.replace("name: demo", f"name: {'a' * 60}"),
        ["run.yaml:9: stages[0].name: '256px': the job name"],
    ),
    "101 environment variables": (
        GOOD + "  environment:\n" + "".join(f"    V{i}: x\n" for i in range(101)),
        ["run.yaml:18: cluster.environment:"],
    ),
    "environment value over 512 characters": (
        GOOD + f"  environment: {{V: {'x' * 513}}}\n",
        ["run.yaml:18: cluster.environment.V: 'xxx"],
    ),
    "a missing section": (
        GOOD.replace("model:\n  preset: sd2\n", ""),
        ["run.yaml:1: model: is missing"],
    ),
    "a key written twice": (
        GOOD + "  instance_type: ml.p4d.24xlarge\n",
        ["run.yaml:18: cluster.instance_type: is written twice"],
    ),
    "spot's key without spot": (
        GOOD + "  max_wait: 6d\n",
        ["run.yaml:18: cluster.max_wait: needs capacity: spot, not on-demand"],
    ),
    "smddp on an image without it": (
        GOOD + "  collective: smddp\n  framework_version: 2.6.0\n",
        ["run.yaml:19: cluster.framework_version: 2.6.0 has no SMDDP"],
    ),
    "sharding with smddp": (
        GOOD.replace("    instances: 4", "    instances: 4\n    sharding: full_shard")
        + "  collective: smddp\n",
        ["run.yaml:12: stages[0].sharding: 'full_shard': FSDP2 needs a newer PyTorch than SMDDP's"],
    ),
    "sharding on an old image": (
        GOOD.replace("    instances: 4", "    instances: 4\n    sharding: hybrid_shard")
        + "  framework_version: 2.5.1\n",
        ["run.yaml:12: stages[0].sharding: 'hybrid_shard': FSDP2 needs PyTorch 2.6, and"],
    ),
    "a first stage that carries on": (
        GOOD.replace("    instances: 4", "    instances: 4\n    optimizer: carried"),
        ["run.yaml:12: stages[0].optimizer: 'carried': is the first stage's: nothing is before it"],
    ),
    "a transformer that learns noise": (
        GOOD.replace("preset: sd2", "preset: mmdit-2b\n  prediction: epsilon"),
        ["run.yaml:8: model.prediction: mmdit-2b learns a flow, not epsilon; leave it out"],
    ),
    "a U-Net that learns a flow": (
        GOOD.replace("preset: sd2", "preset: sd2\n  prediction: flow"),
        ["run.yaml:8: model.prediction: sd2 learns v_prediction or epsilon, not flow"],
    ),
    "zero terminal SNR of noise": (
        GOOD.replace("preset: sd2", "preset: sdxl\n  zero_terminal_snr: true"),
        ["run.yaml:8: model.zero_terminal_snr: needs prediction: v_prediction, and sdxl has"],
    ),
    "a shift without a flow": (
        GOOD.replace("preset: sd2", "preset: sd2\n  timestep_shift: 3.0"),
        ["run.yaml:8: model.timestep_shift: means nothing to v_prediction; leave it out"],
    ),
    "min-SNR of a flow": (
        GOOD.replace("preset: sd2", "preset: dit-xl\n  min_snr_gamma: 5"),
        ["run.yaml:8: model.min_snr_gamma: means nothing to flow; leave it out"],
    ),
    "true is no number": (
        GOOD.replace("iterations: 1000", "iterations: yes"),
        ["run.yaml:14: stages[0].iterations: True: write a number"],
    ),
    "two stages of one name": (
        GOOD.replace(
            "cluster:", GOOD[GOOD.index("  - name") : GOOD.index("cluster:")] + "cluster:"
        ),
        ["run.yaml:16: stages[1].name: '256px': is the name of an earlier stage too"],
    ),
    "not a number": (
        GOOD.replace("1e-4", ".nan"),
        ["run.yaml:15: stages[0].learning_rate: nan: must be"],
    ),
    "a model that does not exist": (
        GOOD.replace("preset: sd2", "preset: sd3"),
        ["run.yaml:7: model.preset: 'sd3' is not one of"],
    ),
    "a tab": ("name: demo\n\tregion: x\n", ["run.yaml:2: a tab; YAML indents with spaces"]),
    "not YAML": ("name: [1, 2\n", ["run.yaml:"]),
    "a list": ("- 1\n", ["run.yaml:1: a run file is a mapping"]),
    "nothing": ("", ["run.yaml:1: a run file is a mapping"]),
}


@pytest.mark.parametrize("case", CASES)
def test_each_mistake_is_one_line_with_place_value_and_mend(tmp_path: Path, case: str) -> None:
    text, expected = CASES[case]
    found = complaints(tmp_path, text)
    assert len(found) == len(expected), found
    for line, start in zip(found, expected, strict=True):
        assert line.startswith(start), line


def test_all_mistakes_come_at_once_even_those_between_keys(tmp_path: Path) -> None:
    text = (
        GOOD.replace("    accumulation: 2", "    accumulation: 2\n    effective_batch_size: 2048")
        .replace("  preset: sd2", "  preset: sd2\n  colour: red")
        .replace("ml.p4de.24xlarge", "ml.p5.48xlarge\n  collective: smddp\n  retries: 31")
    )
    found = complaints(tmp_path, text)
    places = [line.split(": ")[1] for line in found]
    assert places == [
        "model.colour",
        "stages[0].effective_batch_size",
        "cluster.collective",
        "cluster.retries",
    ]


def test_a_missing_file_says_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(RunFileError, match=r"no such file; `sm-train init"):
        load_run(tmp_path / "run.yaml")


def test_a_validated_run_survives_its_own_json(tmp_path: Path) -> None:
    config = read(tmp_path, GOOD)
    assert RunConfig.model_validate_json(config.model_dump_json()) == config


def test_yaml_and_json_agree_on_what_is_valid(tmp_path: Path) -> None:
    """The published schema accepts what the program accepts."""
    import jsonschema

    schema = RunConfig.model_json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(yaml.safe_load(GOOD.replace("1e-4", "1.0e-4")), schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(yaml.safe_load(GOOD.replace("preset: sd2", "preset: sd3")), schema)
