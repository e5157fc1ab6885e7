"""A valid run file loads with its defaults; an invalid one reports every mistake by line."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from sm_train.estimators.config.fields import pattern_message
from sm_train.estimators.config.load import RunFileError, load_document, load_run
from sm_train.estimators.config.schema import RunConfig

from tests.support.run_documents import run

VALID = """\
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


def load(tmp_path: Path, text: str) -> RunConfig:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return load_run(path)


def load_errors(tmp_path: Path, text: str) -> list[str]:
    with pytest.raises(RunFileError) as caught:
        load(tmp_path, text)
    return [line.removeprefix(f"{tmp_path}/") for line in str(caught.value).splitlines()]


def test_only_the_start_of_an_endless_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    os.mkfifo(path)
    written = 0

    def write() -> None:
        nonlocal written
        with suppress(BrokenPipeError), path.open("wb", buffering=0) as pipe:
            while written < 2**24:
                written += pipe.write(bytes(2**16))

    writer = threading.Thread(target=write)
    writer.start()
    with pytest.raises(RunFileError, match=r"run.yaml: more than 1 MiB; a run file is a few"):
        load_run(path)
    writer.join()
    assert written < 2**21


def test_a_gigabyte_is_refused_without_being_read(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    with path.open("wb") as file:
        file.truncate(2**30)
    with pytest.raises(RunFileError, match="more than 1 MiB"):
        load_run(path)


def test_an_override_has_the_same_limits(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(VALID)
    with pytest.raises(RunFileError, match=r"^--set: tags: is nested in more than 50 levels$"):
        load_run(tmp_path / "run.yaml", ["tags=" + "[" * 900 + "]" * 900])


def test_an_anchor_may_be_repeated(tmp_path: Path) -> None:
    text = VALID.replace("instances: 4", "instances: &four 4").replace("steps: 2", "steps: *four")
    assert load(tmp_path, text).stages[0].gradient_accumulation_steps == 4


def test_a_digest_may_be_longer_than_a_number(tmp_path: Path) -> None:
    """Hexadecimal digits without a prefix are a text, also if the first ones are decimal."""
    digest = "7d" + "0123456789abcdef" * 4
    config = load(tmp_path, f"tags: {{data: {digest}}}\n" + VALID)
    assert config.tags == {"data": digest}


def test_valid_file_loads_with_defaults(tmp_path: Path) -> None:
    config = load(tmp_path, VALID)
    assert config.stages[0].learning_rate == 1e-4
    assert config.cluster.retries == 3
    assert config.cluster.max_runtime == 5 * 86400


@pytest.mark.parametrize(
    ("written", "seconds"), [("90s", 90), ("30m", 1800), ("36h", 129600), ("2d", 172800), (77, 77)]
)
def test_durations_are_parsed_as_seconds(tmp_path: Path, written: object, seconds: int) -> None:
    config = load(tmp_path, VALID + f"  max_runtime: {written}\n")
    assert config.cluster.max_runtime == seconds


CASES = {
    "unknown_key": (
        VALID.replace("    instances: 4", "    instances: 4\n    per_gpu_bach: 1"),
        ["run.yaml:12: stages[0].per_gpu_bach: unknown key; did you mean per_device_batch_size?"],
    ),
    "unknown_section": (
        VALID + "chekpoint: {every: 1}\n",
        ["run.yaml:18: chekpoint: unknown key; did you mean checkpoint?"],
    ),
    "key_of_another_section": (
        VALID.replace("    instances: 4", "    instances: 4\n    capacity: spot")
        + "  max_steps: 5\n  role: r\n",
        [
            "run.yaml:12: stages[0].capacity: unknown key; it belongs in cluster",
            "run.yaml:19: cluster.max_steps: unknown key; it belongs in each of stages",
            "run.yaml:20: cluster.role: unknown key; it belongs at the top level",
        ],
    ),
    "number_as_name": (
        VALID.replace("name: demo", "name: 1:30"),
        ["run.yaml:1: name: YAML reads this as a number, not as text: quote it"],
    ),
    "smddp_on_a_type_without_efa": (
        VALID.replace("ml.p4de.24xlarge", "ml.g5.2xlarge") + "  backend: smddp\n",
        ["run.yaml:18: cluster.backend: smddp does not run on ml.g5.2xlarge (SMDDP supports p4d"],
    ),
    "streaming_without_an_epoch": (
        VALID.replace("shards/\n", "shards/\n  reader: webdataset\n"),
        ["run.yaml:4: data.epoch_samples: is missing; reader: webdataset counts by it"],
    ),
    "streaming_with_aspect_buckets": (
        VALID.replace(
            "shards/\n", "shards/\n  reader: webdataset\n  samples: 9\n  aspect_buckets: true\n"
        ),
        ["run.yaml:8: data.aspect_buckets: needs reader: indexed; set it to false"],
    ),
    "streaming_with_an_index": (
        VALID.replace("shards/\n", "shards/\n  reader: webdataset\n  samples: 9\n  index: true\n"),
        ["run.yaml:8: data.index: is not read by reader: webdataset; remove it"],
    ),
    "command_without_streaming": (
        VALID.replace("shards/\n", "shards/\n  pipe: 'cat {path}'\n"),
        ["run.yaml:6: data.pipe: is used by reader: webdataset; set it, or remove"],
    ),
    "caption_of_json_without_fields": (
        VALID.replace("shards/\n", "shards/\n  caption: {txt: 1, json: 0.5}\n"),
        ["run.yaml:6: data.caption.json: must be [{field: NAME, weight: 1}]"],
    ),
    "caption_field_with_a_wrong_index": (
        VALID.replace("shards/\n", "shards/\n  caption: {json: [{field: 'a[x]'}]}\n"),
        ["run.yaml:6: data.caption.json[0].field: 'a[x]': must be a field such as alt_text"],
    ),
    "sources_are_channels": (
        VALID.replace(
            "shards/\n", "shards/\n  sources: [{channel: train}, {channel: art}]\n"
        ).replace("1e-4\n", "1e-4\n    sources: [{channel: train}, {channel: train}]\n"),
        [
            "run.yaml:6: data.sources[1].channel: 'art': is no channel; add it to channels: train",
            "run.yaml:17: stages[0].sources[1].channel: 'train': is already a source",
        ],
    ),
    "sources_with_one_index": (
        VALID.replace("shards/\n", "shards/\n  sources: [{channel: art}, {channel: train}]\n")
        + "channels: {art: {uri: s3://my-bucket/shards}}\n",
        [
            "run.yaml:6: data.sources[1].channel: 'train': has the shards of art; list one of "
            "them, with the sum of the weights",
        ],
    ),
    "extras_of_the_built_in_training": (
        VALID.replace("shards/\n", "shards/\n  extras: {depth: {member: depth.npy}}\n"),
        ["run.yaml:6: data.extras: needs entry: a loop of yours; the built-in training reads"],
    ),
    "array_without_a_shape": (
        VALID.replace("shards/\n", "shards/\n  extras: {clip: {member: clip.npy, kind: array}}\n"),
        ["run.yaml:6: data.extras.clip.shape: is missing"],
    ),
    "transform_without_a_function": (
        VALID.replace("shards/\n", "shards/\n  transform: prepare\n"),
        ["run.yaml:6: data.transform: 'prepare': must be a module:function of your code"],
    ),
    "zero_instances": (
        VALID.replace("instances: 4", "instances: 0"),
        ["run.yaml:11: stages[0].instances: 0: must be greater than or equal to 1"],
    ),
    "batch_size_needs_accumulation": (
        VALID.replace(
            "    gradient_accumulation_steps: 2",
            "    effective_batch_size: 2048\n    gradient_accumulation_steps: 2",
        ),
        [
            "run.yaml:13: stages[0].effective_batch_size: 2048: does not multiply out: "
            "8 per GPU × 2 accumulation steps × 32 GPUs = 512; write gradient_accumulation_steps: 8"
        ],
    ),
    "batch_size_is_not_a_multiple": (
        VALID.replace("    gradient_accumulation_steps: 2", "    effective_batch_size: 100"),
        [
            "run.yaml:13: stages[0].effective_batch_size: 100: does not multiply out: "
            "8 per GPU × 1 accumulation steps × 32 GPUs = 256; 100 is not a multiple of 8 "
            "× 32 GPUs"
        ],
    ),
    "unknown_instance_type": (
        VALID.replace("ml.p4de.24xlarge", "ml.p4de.24xlage"),
        ["run.yaml:17: cluster.instance_type:"],
    ),
    "smddp_on_p5": (
        VALID.replace("ml.p4de.24xlarge", "ml.p5.48xlarge") + "  backend: smddp\n",
        ["run.yaml:18: cluster.backend: smddp does not run on ml.p5.48xlarge"],
    ),
    "max_timeout_below_min_timeout": (
        VALID + "heartbeat: {min_timeout: 10m, max_timeout: 5m}\n",
        ["run.yaml:18: heartbeat.max_timeout: 300 s is less than min_timeout 600 s"],
    ),
    "webhook_url_instead_of_secret_name": (
        VALID + "alerts: {slack_secret: 'https://hooks.slack.com/services/T0/B0/X'}\n",
        ["run.yaml:18: alerts.slack_secret: (not shown): must be the name of a secret"],
    ),
    "topic_name_instead_of_arn": (
        VALID + "alerts: {sns_topic: sm-train}\n",
        ["run.yaml:18: alerts.sns_topic: 'sm-train': must be a topic ARN such as arn:aws:sns"],
    ),
    "uri_is_a_single_object": (
        VALID.replace("s3://my-bucket/shards/", "s3://my-bucket/shards/a.tar"),
        ["run.yaml:5: data.uri: s3://my-bucket/shards/a.tar is a single object"],
    ),
    "quote_in_variable": (
        VALID + "  environment: {GREETING: it's}\n",
        ['run.yaml:18: cluster.environment.GREETING: "it\'s": must not contain quotes'],
    ),
    "line_break_in_variable": (
        VALID + '  environment: {GREETING: "a\\nb"}\n',
        ["run.yaml:18: cluster.environment.GREETING: 'a\\nb': must not contain quotes"],
    ),
    "invalid_job_name": (
        VALID.replace("name: demo", "name: my_demo"),
        ["run.yaml:1: name: 'my_demo': must be letters and digits with single hyphens between"],
    ),
    "job_name_too_long": (
        VALID.replace("name: demo", f"name: {'a' * 60}"),
        ["run.yaml:9: stages[0].name: '256px': the job name"],
    ),
    "too_many_variables": (
        VALID + "  environment:\n" + "".join(f"    V{i}: x\n" for i in range(101)),
        ["run.yaml:18: cluster.environment:"],
    ),
    "variable_too_long": (
        VALID + f"  environment: {{V: {'x' * 513}}}\n",
        ["run.yaml:18: cluster.environment.V: 'xxx"],
    ),
    "missing_section": (
        VALID.replace("model:\n  preset: sd2\n", ""),
        ["run.yaml:1: model.preset: is missing; write one of digits, dit-xl, mmdit-20b"],
    ),
    "duplicate_key": (
        VALID + "  instance_type: ml.p4d.24xlarge\n",
        ["run.yaml:18: cluster.instance_type: appears twice; keep one"],
    ),
    "max_wait_without_spot": (
        VALID + "  max_wait: 6d\n",
        ["run.yaml:18: cluster.max_wait: requires capacity: spot, not on-demand"],
    ),
    "image_without_smddp": (
        VALID + "  backend: smddp\n  framework_version: 2.6.0\n",
        ["run.yaml:19: cluster.framework_version: 2.6.0 has no SMDDP"],
    ),
    "bf16_sums_with_smddp": (
        VALID + "  backend: smddp\ntraining:\n  reduce_dtype: bf16\n",
        ["run.yaml:20: training.reduce_dtype: 'bf16': SMDDP's sum of bf16 gradients"],
    ),
    "sharding_with_smddp": (
        VALID.replace("    instances: 4", "    instances: 4\n    sharding: full_shard")
        + "  backend: smddp\n",
        ["run.yaml:12: stages[0].sharding: 'full_shard': FSDP2 needs a newer PyTorch than SMDDP's"],
    ),
    "fp8_without_hardware": (
        VALID + "training: {precision: fp8}\n",
        ["run.yaml:18: training.precision: 'fp8': ml.p4de.24xlarge (A100-SXM4-80GB) has no fp8; "],
    ),
    "fp8_with_an_adapter": (
        VALID.replace("ml.p4de.24xlarge", "ml.p5.48xlarge").replace(
            "preset: sd2", "preset: sd2\n  lora: {rank: 4}"
        )
        + "training: {precision: fp8}\n",
        ["run.yaml:19: training.precision: 'fp8': is not for adapters, whose base is frozen"],
    ),
    "sharding_on_old_pytorch": (
        VALID.replace("    instances: 4", "    instances: 4\n    sharding: hybrid_shard")
        + "  framework_version: 2.5.1\n",
        ["run.yaml:12: stages[0].sharding: 'hybrid_shard': FSDP2 needs PyTorch 2.6, and"],
    ),
    "selective_checkpointing_on_old_pytorch": (
        VALID.replace("instances: 4", "instances: 4\n    activation_checkpointing: selective")
        + "  framework_version: 2.3.0\n",
        ["run.yaml:12: stages[0].activation_checkpointing: 'selective': needs the diffusers of"],
    ),
    "unknown_checkpointing": (
        VALID.replace("instances: 4", "instances: 4\n    activation_checkpointing: some"),
        [
            "run.yaml:12: stages[0].activation_checkpointing: 'some': must be true, false or "
            "'selective'"
        ],
    ),
    "unknown_compilation": (
        VALID + "training:\n  compile: sometimes\n",
        ["run.yaml:19: training.compile: 'sometimes': must be 'auto', true or false"],
    ),
    "first_stage_keeps_optimizer_state": (
        VALID.replace("    instances: 4", "    instances: 4\n    optimizer_state: keep"),
        [
            "run.yaml:12: stages[0].optimizer_state: 'keep': does not apply to the first "
            "stage, which has no previous one"
        ],
    ),
    "first_stage_learns_something_else": (
        VALID.replace("    instances: 4", "    instances: 4\n    prediction_type: epsilon"),
        [
            "run.yaml:12: stages[0].prediction_type: 'epsilon': does not apply to the first "
            "stage, which has no previous one"
        ],
    ),
    "stage_predicts_what_the_preset_cannot": (
        VALID.replace(
            "cluster:",
            VALID[VALID.index("  - name") : VALID.index("cluster:")].replace("256px", "512px")
            + "    prediction_type: flow\ncluster:",
        ),
        [
            "run.yaml:23: stages[1].prediction_type: 'flow': sd2 supports "
            "v_prediction or epsilon, not flow; remove it"
        ],
    ),
    "stage_objective_without_a_function": (
        VALID.replace("    instances: 4", "    instances: 4\n    objective: huber"),
        [
            "run.yaml:12: stages[0].objective: 'huber': must be a module:function of your code, "
            "such as losses:huber, or preset"
        ],
    ),
    "epsilon_for_transformer": (
        VALID.replace("preset: sd2", "preset: mmdit-2b\n  prediction_type: epsilon"),
        ["run.yaml:8: model.prediction_type: mmdit-2b supports flow, not epsilon; remove it"],
    ),
    "flow_for_unet": (
        VALID.replace("preset: sd2", "preset: sd2\n  prediction_type: flow"),
        ["run.yaml:8: model.prediction_type: sd2 supports v_prediction or epsilon, not flow"],
    ),
    "zero_terminal_snr_with_epsilon": (
        VALID.replace("preset: sd2", "preset: sdxl\n  zero_terminal_snr: true"),
        ["run.yaml:8: model.zero_terminal_snr: requires prediction_type: v_prediction, and sdxl"],
    ),
    "timestep_shift_without_flow": (
        VALID.replace("preset: sd2", "preset: sd2\n  timestep_shift: 3.0"),
        ["run.yaml:8: model.timestep_shift: does not apply to v_prediction; remove it"],
    ),
    "min_snr_with_zero_snr": (
        VALID.replace(
            "preset: sd2",
            "preset: sd2\n  prediction_type: v_prediction\n  zero_terminal_snr: true\n"
            "  min_snr_gamma: 5",
        ),
        [
            "run.yaml:10: model.min_snr_gamma: gives the last timestep of zero_terminal_snr, whose "
            "SNR is 0, the weight 0, so it would never be trained; remove one of the two"
        ],
    ),
    "min_snr_with_flow": (
        VALID.replace("preset: sd2", "preset: dit-xl\n  min_snr_gamma: 5"),
        ["run.yaml:8: model.min_snr_gamma: does not apply to flow; remove it"],
    ),
    "boolean_instead_of_number": (
        VALID.replace("max_steps: 1000", "max_steps: yes"),
        ["run.yaml:14: stages[0].max_steps: True: write a number"],
    ),
    "duplicate_stage_name": (
        VALID.replace(
            "cluster:", VALID[VALID.index("  - name") : VALID.index("cluster:")] + "cluster:"
        ),
        ["run.yaml:16: stages[1].name: '256px': is already the name of an earlier stage"],
    ),
    "nan_learning_rate": (
        VALID.replace("1e-4", ".nan"),
        ["run.yaml:15: stages[0].learning_rate: nan: must be"],
    ),
    "unknown_preset": (
        VALID.replace("preset: sd2", "preset: sd3"),
        ["run.yaml:7: model.preset: 'sd3' is not one of"],
    ),
    "kms_key_for_nvme": (
        VALID + "  volume_kms_key: alias/own\n",
        [
            "run.yaml:18: cluster.volume_kms_key: ml.p4de.24xlarge has local NVMe drives, which "
            "its hardware encrypts; SageMaker accepts no key for them: remove it"
        ],
    ),
    "volume_larger_than_nvme": (
        VALID.replace("ml.p4de.24xlarge", "ml.g5.xlarge\n  volume_gb: 300"),
        ["run.yaml:18: cluster.volume_gb: 300 is more than the 250 GB of ml.g5.xlarge's local"],
    ),
    "alternatives_in_warm_pool": (
        VALID
        + "  alternatives: [ml.p5.48xlarge]\n  capacity: warm-pool\n  keep_alive_period: 1h\n",
        [
            "run.yaml:18: cluster.alternatives: require capacity: on-demand or training-plan, "
            "not warm-pool"
        ],
    ),
    "duplicate_alternative": (
        VALID + "  alternatives: [ml.p5.48xlarge, ml.p4de.24xlarge]\n",
        ["run.yaml:18: cluster.alternatives: each type may appear only once"],
    ),
    "too_many_alternatives": (
        VALID + "  alternatives: [ml.p4d.24xlarge, a, b, c, d]\n",
        ["run.yaml:18: cluster.alternatives: ['ml.p4d.24xlarge', 'a', 'b', 'c', 'd']: List should"],
    ),
    "alternative_with_other_gpu_count": (
        VALID.replace("instances: 4", "instances: 1").replace("p4de.24xlarge", "g6e.12xlarge")
        + "  alternatives: [ml.p5.48xlarge]\n",
        [
            "run.yaml:11: stages[0].instances: 1: 1 × ml.g6e.12xlarge have 4 GPUs, which is not a "
            "multiple of the 8 of ml.p5.48xlarge; remove it from cluster.alternatives"
        ],
    ),
    "alternative_without_smddp": (
        VALID + "  alternatives: [ml.p5.48xlarge]\n  backend: smddp\n",
        ["run.yaml:19: cluster.backend: smddp does not run on ml.p5.48xlarge"],
    ),
    "credentials_without_vpc": (
        VALID
        + "  image: registry.example.com/own:1\n"
        + "  image_credentials: arn:aws:lambda:us-east-1:210987654321:function:registry\n",
        ["run.yaml:19: cluster.image_credentials: requires vpc: SageMaker logs in"],
    ),
    "codeartifact_with_smddp": (
        VALID
        + "  backend: smddp\n"
        + "  package_index: arn:aws:codeartifact:us-east-1:210987654321:repository/own/packages\n",
        ["run.yaml:19: cluster.package_index: with backend: smddp AWS's toolkit installs"],
    ),
    "package_index_without_https": (
        VALID + "  package_index: http://packages.example.com/simple/\n",
        ["run.yaml:18: cluster.package_index: 'http://packages.example.com/simple/': must be"],
    ),
    "file_system_without_vpc": (
        VALID
        + "channels:\n  words:\n    file_system: {id: fs-01234567, type: EFS, directory: /words}\n",
        ["run.yaml:20: channels.words.file_system.id: 'fs-01234567': requires cluster.vpc"],
    ),
    "channel_without_place": (
        VALID + "channels:\n  words: {mode: File}\n",
        ["run.yaml:19: channels.words.uri: is missing; write an S3 URI, or file_system"],
    ),
    "max_pending_too_short": (
        VALID + "  max_pending: 29m\n",
        ["run.yaml:18: cluster.max_pending: '29m': must be greater than or equal to 1800"],
    ),
    "isolation_without_image": (
        VALID + "  network_isolation: true\n",
        ["run.yaml:18: cluster.network_isolation: true requires image: nothing can be installed"],
    ),
    "invalid_subnet": (
        VALID + "  vpc: {subnets: [subnet 1], security_groups: [sg-1]}\n",
        ["run.yaml:18: cluster.vpc.subnets[0]: 'subnet 1': must be an ID such as subnet-0123abcd"],
    ),
    "invalid_training_plan": (
        VALID + "  capacity: training-plan\n  training_plan: my-plan\n",
        [
            "run.yaml:19: cluster.training_plan: 'my-plan': must be a plan ARN",
            "run.yaml:19: cluster.training_plan: capacity training-plan requires the ARN",
        ],
    ),
    "invalid_tag_character": (
        "tags: {team: 'a;b'}\n" + VALID,
        ["run.yaml:1: tags.team: 'a;b': contains ';'; a tag is letters, digits, spaces"],
    ),
    "reserved_tag_prefix": (
        "tags: {'sm-train:run': x}\n" + VALID,
        ["run.yaml:1: tags.sm-train:run: 'sm-train:run': starts with sm-train:, which is"],
    ),
    "reserved_channel": (
        "channels: {train: {uri: s3://own/a/}}\n" + VALID,
        ["run.yaml:1: channels.train: 'train': is a channel name reserved for sm-train; rename"],
    ),
    "entry_without_code": (
        "entry: own.py\n" + VALID,
        ["run.yaml:1: entry: 'own.py': requires code: the folder that contains it"],
    ),
    "entry_outside_code": (
        "code: own\nentry: ../own.py\n" + VALID,
        ["run.yaml:2: entry: '../own.py': must be the path of a Python file below code"],
    ),
    "pytorch_too_old": (
        VALID + "  framework_version: 2.2.0\n",
        ["run.yaml:18: cluster.framework_version: the training code needs PyTorch 2.3 or newer"],
    ),
    "tab_indentation": (
        "name: demo\n\tregion: x\n",
        ["run.yaml:2: a tab; YAML indents with spaces"],
    ),
    "alias_bomb": (
        "a: &a [x, x, x, x, x, x, x, x, x, x]\n"
        + "".join(f"{b}: &{b} [{', '.join([f'*{a}'] * 10)}]\n" for a, b in pairwise("abcdefghi")),
        ["run.yaml:5: has more than 100,000 values; an alias counts as what it repeats"],
    ),
    "endless_alias": (
        "name: &a [*a]\n",
        ["run.yaml:1: has more than 100,000 values; an alias counts as what it repeats"],
    ),
    "too_many_values": (
        "name: [" + "1," * 100_000 + "1]\n",
        ["run.yaml:1: has more than 100,000 values; an alias counts as what it repeats"],
    ),
    "ten_thousand_levels": (
        "name: " + "[" * 10_000 + "]" * 10_000 + "\n",
        ["run.yaml:1: is nested in more than 50 levels"],
    ),
    "ten_thousand_mappings": (
        "name: " + "{a: " * 10_000 + "1" + "}" * 10_000 + "\n",
        ["run.yaml:1: is nested in more than 50 levels"],
    ),
    "merge_bomb": (
        "a: &a {p: 1}\n"
        + "".join(
            f"{b}: &{b} {{<<: [{', '.join([f'*{a}'] * 10)}]}}\n" for a, b in pairwise("abcdefg")
        ),
        ["run.yaml:6: has more than 100,000 values; an alias counts as what it repeats"],
    ),
    "endless_merge": (
        "a: &a\n  <<: *a\n",
        ["run.yaml:2: has more than 100,000 values; an alias counts as what it repeats"],
    ),
    "long_integer": (
        "name: demo\nregion: " + "9" * 5000 + "\n",
        ["run.yaml:2: a number of more than 40 digits; quote it"],
    ),
    "long_hexadecimal_integer": (
        "name: 0x" + "f" * 5000 + "\n",
        ["run.yaml:1: a number of more than 40 digits; quote it"],
    ),
    "long_base_60_integer": (
        "name: " + ":".join(["59"] * 500) + "\n",
        ["run.yaml:1: a number of more than 40 digits; quote it"],
    ),
    "not_yaml": ("name: [1, 2\n", ["run.yaml:"]),
    "list_at_root": ("- 1\n", ["run.yaml:1: a run file is a mapping"]),
    "empty_file": ("", ["run.yaml:1: a run file is a mapping"]),
}


@pytest.mark.parametrize("case", CASES)
def test_each_mistake_is_one_line_with_path_value_and_fix(tmp_path: Path, case: str) -> None:
    text, expected = CASES[case]
    errors = load_errors(tmp_path, text)
    assert len(errors) == len(expected), errors
    for line, start in zip(errors, expected, strict=True):
        assert line.startswith(start), line


def test_all_mistakes_are_reported_at_once_across_sections(tmp_path: Path) -> None:
    text = (
        VALID.replace(
            "    gradient_accumulation_steps: 2",
            "    gradient_accumulation_steps: 2\n    effective_batch_size: 2048",
        )
        .replace("  preset: sd2", "  preset: sd2\n  colour: red")
        .replace("ml.p4de.24xlarge", "ml.p5.48xlarge\n  backend: smddp\n  retries: 31")
    )
    paths = [line.split(": ")[1] for line in load_errors(tmp_path, text)]
    assert paths == [
        "model.colour",
        "stages[0].effective_batch_size",
        "cluster.backend",
        "cluster.retries",
    ]


# Concatenated, so that no scanner takes them for real credentials in this repository.
SECRETS = {
    "aws_access_key": ("an AWS access key", "AKIA" + "ABCDEFGHIJKLMNOP"),
    "aws_temporary_key": ("an AWS access key", "ASIA" + "ABCDEFGHIJKLMNOP"),
    "aws_secret_key": ("an AWS secret key", "aws_secret_access_key=" + "abc/1234+d" * 4),
    "slack_webhook": (
        "a Slack webhook",
        "https://hooks.slack.com" + "/services/T00000000/B00000000/" + "x" * 24,
    ),
    "slack_bot_token": ("a Slack token", "xoxb-" + "1234567890-abcdefghij"),
    "slack_app_token": ("a Slack token", "xapp-" + "1-A0123456789-0123456789"),
    "github_token": ("a GitHub token", "ghp_" + "a" * 36),
    "github_fine_grained_token": ("a GitHub token", "github_pat_" + "A" * 22),
    "gitlab_token": ("a GitLab token", "glpat-" + "a" * 20),
    "hugging_face_token": ("a Hugging Face token", "hf_" + "a" * 34),
    "private_key": ("a private key", "-----BEGIN " + "RSA PRIVATE KEY-----"),
    "anthropic_key": ("an OpenAI, Anthropic or OpenRouter key", "sk-ant-" + "a" * 40),
    "google_api_key": ("a Google API key", "AIza" + "a" * 35),
    "password_in_url": ("a password in a URL", "https://me:secret" + "@example.com/simple"),
}


@pytest.mark.parametrize("name", SECRETS)
@pytest.mark.parametrize("path", ["cluster.environment.KEY", "tags.key", "evaluation.prompts[0]"])
def test_credential_is_rejected_by_path_and_never_shown(
    tmp_path: Path, name: str, path: str
) -> None:
    kind, secret = SECRETS[name]
    text = {
        "cluster.environment.KEY": VALID + f"  environment: {{KEY: '{secret}'}}\n",
        "tags.key": f"{VALID}tags: {{key: '{secret}'}}\n",
        "evaluation.prompts[0]": f"{VALID}evaluation: {{prompts: ['{secret}']}}\n",
    }[path]
    errors = load_errors(tmp_path, text)
    assert [line for line in errors if line.startswith(f"run.yaml:18: {path}: looks like {kind}")]
    assert secret not in "\n".join(errors)


def test_credential_with_another_mistake_is_not_shown(tmp_path: Path) -> None:
    _, secret = SECRETS["github_token"]
    errors = load_errors(tmp_path, VALID + f'  environment: {{KEY: "{secret}\'"}}\n')
    assert len(errors) == 2
    assert secret not in "\n".join(errors)


@pytest.mark.parametrize(
    ("override", "path", "value"),
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
def test_override_sets_a_value(
    tmp_path: Path, override: str, path: tuple[str | int, ...], value: object
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(VALID)
    actual: Any = load_run(file, [override]).model_dump()
    for key in path:
        actual = actual[key]
    assert actual == value


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("retries", "--set: 'retries': write it as a.b=value"),
        ("stages.512px.instances=8", "--set: stages.512px.instances: 512px does not exist"),
        ("stages.7=1", "--set: stages.7: 7 does not exist"),
        ("name.first=x", "--set: name.first: first does not exist"),
        ("name=[", "--set: name: the value is not YAML; quote it"),
        ("cluster.retires=3", "run.yaml:16: cluster.retires: unknown key; did you mean retries?"),
        ("cluster.retries=31", "run.yaml:16: cluster.retries: 31: must be less than or equal"),
    ],
)
def test_invalid_override_is_one_line(tmp_path: Path, override: str, message: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(VALID)
    with pytest.raises(RunFileError) as caught:
        load_run(file, [override])
    [line] = str(caught.value).splitlines()
    assert line.removeprefix(f"{tmp_path}/").startswith(message)


_keys = st.sampled_from(["name", "stages", "cluster", "0", "256px", "environment", "max_steps"])


@given(
    st.one_of(
        st.text(),
        st.builds("{}={}".format, st.lists(_keys, min_size=1).map(".".join), st.text()),
        st.builds("{}={}".format, _keys, st.from_regex(r"[-:\d\[\]{}&*!|>'\"#, ]{0,12}")),
    )
)
def test_any_override_is_valid_or_rejected(override: str) -> None:
    document = yaml.safe_load(VALID)
    try:
        config = load_document(document, [override], "JOB")
    except RunFileError:
        return
    assert RunConfig.model_validate(config.model_dump()) == config


def test_missing_file_suggests_init(tmp_path: Path) -> None:
    with pytest.raises(RunFileError, match=r"no such file; `sm-train init"):
        load_run(tmp_path / "run.yaml")


def test_run_config_round_trips_through_json(tmp_path: Path) -> None:
    config = load(tmp_path, VALID)
    assert RunConfig.model_validate_json(config.model_dump_json()) == config


def test_every_pattern_says_what_a_value_must_look_like() -> None:
    def patterns(schema: Any) -> Iterator[str]:
        if isinstance(schema, dict):
            yield from (value for key, value in schema.items() if key == "pattern")
            yield from (key for key in schema.get("patternProperties", {}))
            schema = list(schema.values())
        for item in schema if isinstance(schema, list) else ():
            yield from patterns(item)

    found = {text for text in patterns(RunConfig.model_json_schema()) if isinstance(text, str)}
    assert len(found) > 20
    # The path of a preset file is a validator's own matter.
    for pattern in found - {r"\.json$"}:
        assert pattern_message(pattern).startswith("must ")


def test_json_schema_accepts_what_load_accepts(tmp_path: Path) -> None:
    import jsonschema

    schema = RunConfig.model_json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(yaml.safe_load(VALID.replace("1e-4", "1.0e-4")), schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(yaml.safe_load(VALID.replace("preset: sd2", "preset: sd3")), schema)


@pytest.mark.parametrize("section", ["tags", "cluster"])
def test_the_name_of_a_tag_or_a_variable_decides_about_its_value(section: str) -> None:
    """The value alone is a word like any other."""
    for name, is_secret in (("DB_PASSWORD", True), ("GREETING", False)):
        own = {name: "correcthorse7"}
        document = run()
        document |= {"tags": own} if section == "tags" else {}
        document["cluster"] |= {"environment": own} if section == "cluster" else {}
        if not is_secret:
            load_document(document, [], "run.yaml")
            continue
        with pytest.raises(RunFileError, match="looks like a password") as error:
            load_document(document, [], "run.yaml")
        assert "correcthorse7" not in f"{error.value}{error.value.problems}"


@pytest.mark.parametrize(
    "key", ["a\nsm-train: done", "a\x1b]0;title\x07", "a\u202eb", "a\u2028b", "a" * 5000, "\ud800"]
)
@pytest.mark.parametrize("section", ["tags", "channels", "alerts"])
def test_a_hostile_key_is_one_short_line(section: str, key: str) -> None:
    document = run() | {section: {key: "\x00"}}
    with pytest.raises(RunFileError) as error:
        load_document(document, [], "run.yaml")
    for line in str(error.value).splitlines():
        assert line.startswith(f"run.yaml:1: {section}")
        assert line.isprintable()
        assert len(line) < 400


TOKEN = "ghp_" + "a1B2c3D4e5F6g7H8i9J0" * 2


@pytest.mark.parametrize(
    "change",
    [
        ("name: ", f"name: {TOKEN} # "),
        ("  instance_type: ", f"  instance_type: {TOKEN} # "),
        ("  preset: ", f"  preset: {TOKEN} # "),
        ("  max_steps: ", f"  max_steps: {TOKEN} # "),
        ("name: ", f"{TOKEN}: 1\nname: "),
        ("stages:", f"alerts: {{slack_secret: {TOKEN}}}\nstages:"),
        ("stages:", f"tags: {{{TOKEN}: x}}\nstages:"),
        ("stages:", f"tags: {{owner: [{TOKEN}]}}\nstages:"),
    ],
)
def test_a_credential_is_found_at_every_place_and_never_shown(
    tmp_path: Path, change: tuple[str, str]
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(VALID.replace(*change, 1))
    assert TOKEN in path.read_text()
    with pytest.raises(RunFileError) as error:
        load_run(path)
    assert "looks like a GitHub token" in str(error.value)
    # `check --json` prints the problems.
    assert TOKEN not in f"{error.value}{error.value.problems}"


def test_an_override_sets_the_last_item_of_a_list_and_none_beyond(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(VALID + "  alternatives: [ml.p4d.24xlarge, ml.p5.48xlarge]\n")
    changed = load_run(path, ["cluster.alternatives.1=ml.p5en.48xlarge"])
    assert changed.cluster.alternatives == ["ml.p4d.24xlarge", "ml.p5en.48xlarge"]
    with pytest.raises(RunFileError, match=r"alternatives\.2: 2 does not exist"):
        load_run(path, ["cluster.alternatives.2=ml.p5en.48xlarge"])


@pytest.mark.parametrize("model", ["", "model:\n  license: apache-2.0\n"])
def test_script_of_the_users_own_needs_no_preset(tmp_path: Path, model: str) -> None:
    (tmp_path / "own").mkdir()
    text = VALID.replace("model:\n  preset: sd2\n", model) + "code: own\nentry: train.py\n"
    config = load(tmp_path, text)
    assert config.model.preset is None
    assert load_errors(tmp_path, text.replace("entry: train.py\n", "")) != []
