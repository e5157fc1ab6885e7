"""The run file: good ones are read, bad ones are told everything that is wrong, line by line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from sm_train.estimators.config.load import RunFileError, load_run, with_changes
from sm_train.estimators.config.schema import RunConfig

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
    per_device_batch_size: 8
    gradient_accumulation_steps: 2
    max_steps: 1000
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
        ["run.yaml:12: stages[0].per_gpu_bach: unknown key; did you mean per_device_batch_size?"],
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
        GOOD.replace(
            "    gradient_accumulation_steps: 2",
            "    effective_batch_size: 2048\n    gradient_accumulation_steps: 2",
        ),
        [
            "run.yaml:13: stages[0].effective_batch_size: 2048: does not multiply out: "
            "8 per GPU × 2 accumulation steps × 32 GPUs = 512; write gradient_accumulation_steps: 8"
        ],
    ),
    "batch that no accumulation makes": (
        GOOD.replace("    gradient_accumulation_steps: 2", "    effective_batch_size: 100"),
        [
            "run.yaml:13: stages[0].effective_batch_size: 100: does not multiply out: "
            "8 per GPU × 1 accumulation steps × 32 GPUs = 256; no accumulation makes 100 of 8 "
            "× 32 GPUs"
        ],
    ),
    "unknown instance type": (
        GOOD.replace("ml.p4de.24xlarge", "ml.p4de.24xlage"),
        ["run.yaml:17: cluster.instance_type:"],
    ),
    "p5 with smddp": (
        GOOD.replace("ml.p4de.24xlarge", "ml.p5.48xlarge") + "  backend: smddp\n",
        ["run.yaml:18: cluster.backend: smddp does not run on ml.p5.48xlarge"],
    ),
    "bounds the wrong way round": (
        GOOD + "heartbeat: {min_timeout: 10m, max_timeout: 5m}\n",
        ["run.yaml:18: heartbeat.max_timeout: 300 s is less than min_timeout 600 s"],
    ),
    "a secret itself instead of its name": (
        GOOD + "alerts: {slack_secret: 'https://hooks.slack.com/services/T0/B0/X'}\n",
        ["run.yaml:18: alerts.slack_secret: '***': must be the name of a secret"],
    ),
    "a topic's name instead of its ARN": (
        GOOD + "alerts: {sns_topic: sm-train}\n",
        ["run.yaml:18: alerts.sns_topic: 'sm-train': must be a topic's ARN such as arn:aws:sns"],
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
        GOOD + "  backend: smddp\n  framework_version: 2.6.0\n",
        ["run.yaml:19: cluster.framework_version: 2.6.0 has no SMDDP"],
    ),
    "sharding with smddp": (
        GOOD.replace("    instances: 4", "    instances: 4\n    sharding: full_shard")
        + "  backend: smddp\n",
        ["run.yaml:12: stages[0].sharding: 'full_shard': FSDP2 needs a newer PyTorch than SMDDP's"],
    ),
    "sharding on an old image": (
        GOOD.replace("    instances: 4", "    instances: 4\n    sharding: hybrid_shard")
        + "  framework_version: 2.5.1\n",
        ["run.yaml:12: stages[0].sharding: 'hybrid_shard': FSDP2 needs PyTorch 2.6, and"],
    ),
    "a first stage that carries on": (
        GOOD.replace("    instances: 4", "    instances: 4\n    optimizer_state: keep"),
        [
            "run.yaml:12: stages[0].optimizer_state: 'keep': is the first stage's: nothing is "
            "before it"
        ],
    ),
    "a transformer that learns noise": (
        GOOD.replace("preset: sd2", "preset: mmdit-2b\n  prediction_type: epsilon"),
        ["run.yaml:8: model.prediction_type: mmdit-2b learns a flow, not epsilon; leave it out"],
    ),
    "a U-Net that learns a flow": (
        GOOD.replace("preset: sd2", "preset: sd2\n  prediction_type: flow"),
        ["run.yaml:8: model.prediction_type: sd2 learns v_prediction or epsilon, not flow"],
    ),
    "zero terminal SNR of noise": (
        GOOD.replace("preset: sd2", "preset: sdxl\n  zero_terminal_snr: true"),
        ["run.yaml:8: model.zero_terminal_snr: needs prediction_type: v_prediction, and sdxl has"],
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
        GOOD.replace("max_steps: 1000", "max_steps: yes"),
        ["run.yaml:14: stages[0].max_steps: True: write a number"],
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
    "a key for drives that have none": (
        GOOD + "  volume_kms_key: alias/own\n",
        [
            "run.yaml:18: cluster.volume_kms_key: ml.p4de.24xlarge has local NVMe drives, which "
            "its hardware encrypts; SageMaker takes no key for them: leave it out"
        ],
    ),
    "a volume larger than the drives": (
        GOOD.replace("ml.p4de.24xlarge", "ml.g5.xlarge\n  volume_gb: 300"),
        ["run.yaml:18: cluster.volume_gb: 300 is more than the 250 GB of ml.g5.xlarge's local"],
    ),
    "alternatives in a warm pool": (
        GOOD + "  alternatives: [ml.p5.48xlarge]\n  capacity: warm-pool\n  keep_alive_period: 1h\n",
        ["run.yaml:18: cluster.alternatives: need capacity: on-demand, not warm-pool"],
    ),
    "the same alternative twice": (
        GOOD + "  alternatives: [ml.p5.48xlarge, ml.p4de.24xlarge]\n",
        ["run.yaml:18: cluster.alternatives: a type can be named only once"],
    ),
    "six types": (
        GOOD + "  alternatives: [ml.p4d.24xlarge, a, b, c, d]\n",
        ["run.yaml:18: cluster.alternatives: ['ml.p4d.24xlarge', 'a', 'b', 'c', 'd']: List should"],
    ),
    "an alternative that breaks the batch": (
        GOOD.replace("instances: 4", "instances: 1").replace("p4de.24xlarge", "g6e.12xlarge")
        + "  alternatives: [ml.p5.48xlarge]\n",
        [
            "run.yaml:11: stages[0].instances: 1: 1 × ml.g6e.12xlarge have 4 GPUs, which no number "
            "of ml.p5.48xlarge has (8 each); leave it out of cluster.alternatives"
        ],
    ),
    "an alternative without smddp": (
        GOOD + "  alternatives: [ml.p5.48xlarge]\n  backend: smddp\n",
        ["run.yaml:19: cluster.backend: smddp does not run on ml.p5.48xlarge"],
    ),
    "too short a wait for machines": (
        GOOD + "  max_pending: 29m\n",
        ["run.yaml:18: cluster.max_pending: '29m': must be greater than or equal to 1800"],
    ),
    "isolation without an image": (
        GOOD + "  network_isolation: true\n",
        ["run.yaml:18: cluster.network_isolation: true needs image: nothing can be installed"],
    ),
    "a subnet that is none": (
        GOOD + "  vpc: {subnets: [subnet 1], security_groups: [sg-1]}\n",
        ["run.yaml:18: cluster.vpc.subnets[0]: 'subnet 1': must be an id such as subnet-0123abcd"],
    ),
    "a plan that is none": (
        GOOD + "  capacity: training-plan\n  training_plan: my-plan\n",
        [
            "run.yaml:19: cluster.training_plan: 'my-plan': must be a plan's ARN",
            "run.yaml:19: cluster.training_plan: capacity training-plan needs the plan's ARN",
        ],
    ),
    "a tag that AWS would not take": (
        "tags: {team: 'a;b'}\n" + GOOD,
        ["run.yaml:1: tags.team: 'a;b': holds ';'; a tag is letters, digits, spaces"],
    ),
    "a tag of ours": (
        "tags: {'sm-train:run': x}\n" + GOOD,
        ["run.yaml:1: tags.sm-train:run: 'sm-train:run': begins with sm-train:, which is"],
    ),
    "a channel of ours": (
        "channels: {train: {uri: s3://own/a/}}\n" + GOOD,
        ["run.yaml:1: channels.train: 'train': is a channel of sm-train's; name yours otherwise"],
    ),
    "an entry without code": (
        "entry: own.py\n" + GOOD,
        ["run.yaml:1: entry: 'own.py': needs code: the folder that it lies in"],
    ),
    "an entry outside code": (
        "code: own\nentry: ../own.py\n" + GOOD,
        ["run.yaml:2: entry: '../own.py': must be a Python file's path below code"],
    ),
    "a PyTorch that is too old": (
        GOOD + "  framework_version: 2.2.0\n",
        ["run.yaml:18: cluster.framework_version: the training code needs PyTorch 2.3 or newer"],
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
        GOOD.replace(
            "    gradient_accumulation_steps: 2",
            "    gradient_accumulation_steps: 2\n    effective_batch_size: 2048",
        )
        .replace("  preset: sd2", "  preset: sd2\n  colour: red")
        .replace("ml.p4de.24xlarge", "ml.p5.48xlarge\n  backend: smddp\n  retries: 31")
    )
    found = complaints(tmp_path, text)
    places = [line.split(": ")[1] for line in found]
    assert places == [
        "model.colour",
        "stages[0].effective_batch_size",
        "cluster.backend",
        "cluster.retries",
    ]


# Put together here, so that no scan of this repository takes them for real ones.
SECRETS = {
    "an AWS access key": "AKIA" + "ABCDEFGHIJKLMNOP",
    "a Slack webhook": "https://hooks.slack.com" + "/services/T00000000/B00000000/" + "x" * 24,
    "a Slack token": "xoxb-" + "1234567890-abcdefghij",
    "a GitHub token": "ghp_" + "a" * 36,
    "a Hugging Face token": "hf_" + "a" * 34,
    "a private key": "-----BEGIN " + "RSA PRIVATE KEY-----",
    "an OpenAI or Anthropic key": "sk-ant-" + "a" * 40,
    "a Google API key": "AIza" + "a" * 35,
    "a password in an address": "https://me:secret" + "@example.com/simple",
}


@pytest.mark.parametrize("kind", SECRETS)
@pytest.mark.parametrize("place", ["cluster.environment.KEY", "tags.key", "evaluation.prompts[0]"])
def test_a_secret_is_refused_by_its_place_and_never_shown(
    tmp_path: Path, kind: str, place: str
) -> None:
    secret = SECRETS[kind]
    text = {
        "cluster.environment.KEY": GOOD + f"  environment: {{KEY: '{secret}'}}\n",
        "tags.key": f"{GOOD}tags: {{key: '{secret}'}}\n",
        "evaluation.prompts[0]": f"{GOOD}evaluation: {{prompts: ['{secret}']}}\n",
    }[place]
    found = complaints(tmp_path, text)
    assert [line for line in found if line.startswith(f"run.yaml:18: {place}: looks like {kind}")]
    assert secret not in "\n".join(found)


def test_a_secret_with_another_mistake_is_not_shown_either(tmp_path: Path) -> None:
    secret = SECRETS["a GitHub token"]
    found = complaints(tmp_path, GOOD + f'  environment: {{KEY: "{secret}\'"}}\n')
    assert len(found) == 2
    assert secret not in "\n".join(found)


@pytest.mark.parametrize(
    ("change", "path", "value"),
    [
        ("cluster.retries=7", ("cluster", "retries"), 7),
        ("stages.256px.instances=8", ("stages", 0, "instances"), 8),
        ("stages[0].learning_rate=2.0e-4", ("stages", 0, "learning_rate"), 2e-4),
        ("stages.0.sharding=full_shard", ("stages", 0, "sharding"), "full_shard"),
        ("budget.usd=500", ("budget", "usd"), 500),
        ("cluster.max_runtime=2d", ("cluster", "max_runtime"), 172800),
        ("cluster.environment.A=b=c", ("cluster", "environment", "A"), "b=c"),
        ("evaluation.prompts=[a, b]", ("evaluation", "prompts"), ["a", "b"]),
    ],
)
def test_a_value_is_set_from_outside(
    tmp_path: Path, change: str, path: tuple[str | int, ...], value: object
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(GOOD)
    found: Any = load_run(file, [change]).model_dump()
    for step in path:
        found = found[step]
    assert found == value


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ("retries", "--set: 'retries': write it as a.b=value"),
        ("stages.512px.instances=8", "--set: stages.512px.instances: there is no 512px there"),
        ("stages.7=1", "--set: stages.7: 7 has no place there"),
        ("name.first=x", "--set: name.first: first has no place there"),
        ("name=[", "--set: name: the value is not YAML; quote it"),
        ("cluster.retires=3", "run.yaml:16: cluster.retires: unknown key; did you mean retries?"),
        ("cluster.retries=31", "run.yaml:16: cluster.retries: 31: must be less than or equal"),
    ],
)
def test_a_change_that_does_not_fit_is_one_line(
    tmp_path: Path, change: str, complaint: str
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(GOOD)
    with pytest.raises(RunFileError) as caught:
        load_run(file, [change])
    [line] = str(caught.value).splitlines()
    assert line.removeprefix(f"{tmp_path}/").startswith(complaint)


_steps = st.sampled_from(["name", "stages", "cluster", "0", "256px", "environment", "max_steps"])


@given(
    st.one_of(
        st.text(),
        st.builds("{}={}".format, st.lists(_steps, min_size=1).map(".".join), st.text()),
        st.builds("{}={}".format, _steps, st.from_regex(r"[-:\d\[\]{}&*!|>'\"#, ]{0,12}")),
    )
)
def test_whatever_is_set_the_run_is_valid_or_the_mistake_is_named(change: str) -> None:
    document = yaml.safe_load(GOOD)
    try:
        config = with_changes(document, [change], "JOB")
    except RunFileError:
        return
    assert RunConfig.model_validate(config.model_dump()) == config


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
