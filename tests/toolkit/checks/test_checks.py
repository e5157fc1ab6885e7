"""Tests of each check, in process."""

from __future__ import annotations

import ast
import math
import re
from datetime import date
from functools import cache
from importlib import import_module
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from sm_train.cost.json_document import as_document
from sm_train.entrypoints.shards.shard_index import IndexHeader
from sm_train.estimators.config.fields import quantity_bytes
from sm_train.estimators.config.schema import RunConfig
from sm_train.toolkit.checks import finding
from sm_train.toolkit.checks.account.quotas import default_runtime_findings
from sm_train.toolkit.checks.account.role import may_assume
from sm_train.toolkit.checks.check_report import show
from sm_train.toolkit.checks.finding import LEVELS, Check, Finding, Subject
from sm_train.toolkit.checks.image import ecr_image, image_findings
from sm_train.toolkit.checks.preflight import offline_findings
from sm_train.toolkit.checks.recovery import recovery_findings
from sm_train.toolkit.checks.shards import (
    Shards,
    augmentation_findings,
    color_findings,
    shard_findings,
)
from sm_train.toolkit.planning.run_price import alternative_costs, estimate_run, total, up_to_suffix

from tests.support.run_documents import config, stage

ROOT = Path(__file__).parents[3]
CHECKS = [
    *sorted((ROOT / "toolkit" / "checks").rglob("[a-z]*.py")),
    ROOT / "toolkit" / "clusters" / "scheduler_checks.py",
]
GB = 10**9


def priced(run: RunConfig) -> dict[str, Any]:
    return as_document(estimate_run(run, "us-east-1"))


@cache
def four_instances(
    instance_type: str = "ml.p4de.24xlarge", steps_per_second: float | None = 1.8
) -> dict[str, Any]:
    """Return the cost document of one stage on four instances."""
    stages = [stage(instances=4, steps_per_second=steps_per_second)]
    return priced(config(cluster={"instance_type": instance_type}, stages=stages))


def levels(findings: Any) -> dict[str, str]:
    return {finding.code: finding.level for finding in findings}


# ------------------------------------------------------------------ shards and the cluster


def shards_checked(
    sizes: list[int], samples: list[int] | None = None, document: dict[str, Any] | None = None
) -> dict[str, Finding]:
    """Return the findings for shards with these sizes, by code."""
    sample_counts = None if samples is None else np.array(samples)
    shards = Shards("data", "s3://b/p/", np.array(sizes), sample_counts)
    return {
        shard_finding.code: shard_finding
        for shard_finding in shard_findings(shards, document or four_instances(), 8, sharded=True)
    }


@pytest.mark.parametrize(
    ("data", "resolution", "found"),
    [
        ({"flip": True}, 256, [("error", "augmented-latents", "data.flip")]),
        ({"caption": {"txt": 1}}, 256, [("error", "augmented-latents", "data.caption")]),
        ({"flip": True}, 512, []),
        ({}, 256, []),
    ],
)
def test_latents_cannot_be_augmented(
    data: dict[str, Any], resolution: int, found: list[tuple[str, str, str]]
) -> None:
    shards = Shards("data", "s3://b/p/", np.array([3 * GB]), None, resolution)
    run = config(data={"uri": "s3://ai-bucket/shards/"} | data)
    findings = augmentation_findings(shards, run)
    assert [(finding.level, finding.code, finding.where) for finding in findings] == found


@pytest.mark.parametrize(
    ("data", "found"),
    [
        ({}, [("error", "latents-color", "data.icc_profile")]),
        (
            {"icc_profile": "ignore", "hdr": "keep"},
            [("warning", "distorted-colors", "data.icc_profile")],
        ),
    ],
)
def test_colors_that_training_would_not_see_as_people_do(
    data: dict[str, Any], found: list[tuple[str, str, str]]
) -> None:
    header = IndexHeader(
        samples=10,
        options={"latents": {"resolution": 256}},
        colors={"none/RGB/8": 9, "Adobe RGB/RGB/8": 1},
    )
    run = config(data={"uri": "s3://ai-bucket/shards/"} | data)
    findings = list(color_findings("s3://b/p.index.parquet", header, run))
    assert [(finding.level, finding.code, finding.where) for finding in findings] == found


LORA = {"preset": "sd2", "lora": {"rank": 4}, "components": "s3://ai-bucket/components/"}


@pytest.mark.parametrize(
    ("samples", "model", "level"),
    [
        (None, {}, None),
        (1_024_000, {}, "warning"),  # half an epoch
        (512_000, {}, None),
        (5_120, {}, None),  # 100 epochs
        (4_000, {}, "warning"),  # 128
        (4_000, LORA, None),
        (500, LORA, "warning"),  # 1,024
        (95, {}, "warning"),  # 5,389
        (51, {}, "error"),  # 10,039
        (51, LORA, "error"),
    ],
)
def test_unusual_numbers_of_epochs_are_reported(
    samples: int | None, model: dict[str, Any], level: str | None
) -> None:
    data = {"uri": "s3://ai-bucket/shards/", "samples": samples}
    found = offline(data=data, **({"model": model} if model else {}))  # 1,000 steps of 512 images
    unusual = found.get(("epochs", "stages[0].max_steps"))
    assert (unusual.level if unusual else None) == level


def training_usd() -> float:
    usd: float = four_instances()["stages"][0]["breakdown_usd"]["training"]
    return usd


def test_idle_instances_are_charged_their_share_of_training() -> None:
    found = shards_checked([3 * GB] * 3)
    idle = found["idle-instances"]
    assert (idle.level, idle.where) == ("error", "stages[0].instances")
    assert f"1 of them idle but billed, ${training_usd() / 4:,.2f} of its training" in idle.message
    assert "shared-shards" not in found


def test_order_of_samples_is_reported_once_for_a_sharded_channel() -> None:
    found = shards_checked([3 * GB] * 4)["order-depends-on-ranks"]
    assert (found.level, found.where) == ("info", "data.sharded")
    assert "data.sharded: false" in found.fix


def test_idle_instances_cost_usd_per_day_without_measured_speed() -> None:
    # Neither the it/s nor the peak of this instance type is known, but its price is.
    document = four_instances("ml.p6-b300.48xlarge", steps_per_second=None)
    day = document["stages"][0]["cluster_per_day_usd"] / 4
    found = shards_checked([3 * GB] * 3, document=document)
    assert f"${day:,.0f} a day" in found["idle-instances"].message
    priceless = four_instances("ml.p5e.48xlarge", steps_per_second=None)
    found = shards_checked([3 * GB] * 3, document=priceless)
    assert "unknown price" in found["idle-instances"].message


def test_unequal_instances_use_sample_counts_when_available() -> None:
    found = shards_checked([3 * GB] * 8, [1000] * 7 + [3000])
    # Three instances have 2,000 samples and one has 4,000: all take as long as the last.
    repeated = 1 - (7 * 1000 + 3000) / (4 * 4000)
    message = found["unequal-instances"].message
    assert found["unequal-instances"].level == "warning"
    assert f"{repeated:.1%} of 256px repeats samples" in message
    assert f"${repeated * training_usd():,.2f} of its training" in message
    assert "are divisible by 4 instances, but differ in samples" in message


def test_one_extra_shard_matters_less_with_more_shards() -> None:
    assert shards_checked([3 * GB] * 9)["unequal-instances"].level == "warning"
    assert shards_checked([3 * GB] * 81)["unequal-instances"].level == "info"
    assert "unequal-instances" not in shards_checked([3 * GB] * 2001)


@given(st.integers(1, 40), st.integers(1, 6 * GB))
def test_divisible_equal_shards_are_never_unequal(times: int, size: int) -> None:
    assert not {"unequal-instances", "idle-instances"} & set(shards_checked([size] * 4 * times))


@given(st.lists(st.integers(0, 6 * GB), min_size=1, max_size=60))
def test_repeated_share_is_between_0_and_75_percent(sizes: list[int]) -> None:
    for reported in shards_checked(sizes).values():
        assert reported.fix
        if reported.code == "unequal-instances":
            share = float(reported.message.split("%")[0].rsplit(" ", 1)[-1])
            assert 0 < share <= 75


def test_shard_sizes_outside_2_to_5_gb_are_reported() -> None:
    within = [2 * GB, 5 * GB, 3 * GB, 2 * GB + 1] * 400
    assert shards_checked(within).keys() <= {"unequal-instances", "order-depends-on-ranks"}
    assert shards_checked([6 * GB, *within])["large-shards"].message.startswith("1 of 1601")
    # A single small shard with the remainder is normal.
    assert "small-shards" not in shards_checked([*within, 10])
    assert shards_checked([10**9] * 1600)["small-shards"].level == "info"
    assert shards_checked([10**8] * 1600)["small-shards"].level == "warning"
    # There is not enough data for larger shards.
    assert shards_checked([10**6] * 4)["small-shards"].level == "info"


def test_fewer_samples_than_one_step_needs_is_a_warning() -> None:
    assert shards_checked([10] * 4, [10] * 4)["few-samples"].level == "warning"
    assert "few-samples" not in shards_checked([10] * 4, [128] * 4)


# ------------------------------------------------------------------ interruptions


def recovery(cluster: dict[str, Any] | None = None, **changes: Any) -> dict[str, str]:
    run = config(cluster={"instance_type": "ml.p4de.24xlarge", **(cluster or {})}, **changes)
    return levels(recovery_findings(run, priced(run)))


def test_several_instances_without_retries_is_a_warning() -> None:
    assert recovery({"retries": 0}) == {"no-retries": "warning"}
    one_instance = [stage(instances=1)]
    assert recovery({"retries": 0}, stages=one_instance) == {}
    assert recovery() == {}


def test_long_run_reports_expected_interruptions() -> None:
    long = [stage(instances=32, max_steps=5_000_000)]
    assert recovery(stages=long)["interruptions-expected"] == "info"


def test_missing_checkpoints_is_an_error_on_spot_only() -> None:
    # 100,000 steps at 1.8 it/s: 15 hours.
    long = {"stages": [stage(max_steps=100_000)], "checkpoint": {"every_steps": 100_000}}
    assert recovery(**long)["no-checkpoints"] == "warning"
    assert recovery({"capacity": "spot"}, **long)["no-checkpoints"] == "error"
    short = {"stages": [stage(max_steps=1000)], "checkpoint": {"every_steps": 1000}}
    assert recovery({"capacity": "spot"}, **short) == {}


def test_expensive_checkpoint_interval_names_a_better_one() -> None:
    stages = [stage(instances=16, max_steps=2_000_000), stage("b", max_steps=1000)]
    run = config(stages=stages, checkpoint={"every_steps": 500_000})
    [found] = [
        recovery_finding
        for recovery_finding in recovery_findings(run, priced(run))
        if recovery_finding.code == "checkpoint-interval"
    ]
    best = priced(run)["stages"][0]["checkpoint_interval"]
    assert found.fix == f"set every_steps: {best['best_steps']}"
    assert f"${best['configured_extra_usd']:,.0f} more" in found.message
    better = config(stages=stages, checkpoint={"every_steps": best["best_steps"]})
    assert "checkpoint-interval" not in levels(recovery_findings(better, priced(better)))


# ------------------------------------------------------------------ the container

CUSTOM_IMAGE = "210987654321.dkr.ecr.eu-west-1.amazonaws.com/team/own:1.2"


def images(today: date = date(2026, 11, 22), **cluster: Any) -> dict[str, Finding]:
    stages = cluster.pop("stages", [stage()])
    run = config(cluster={"instance_type": "ml.p4de.24xlarge", **cluster}, stages=stages)
    return {
        image_finding.code: image_finding
        for image_finding in image_findings(run, "us-east-1", today)
    }


def test_image_of_another_region_is_an_error() -> None:
    assert "eu-west-1" in images(image=CUSTOM_IMAGE)["image-region"].message
    assert images(image=CUSTOM_IMAGE.replace("eu-west-1", "us-east-1")) == {}


def test_image_of_another_registry_needs_a_network_that_reaches_it() -> None:
    private = "registry.example.com/own:1"
    finding = images(image=private)["image-unavailable"]
    assert (finding.level, finding.where) == ("error", "cluster.image")
    assert finding.message == f"{private} is not in Amazon ECR"
    network = {"subnets": ["subnet-1"], "security_groups": ["sg-1"]}
    assert images(image=private, vpc=network) == {}


def test_types_that_no_training_job_of_ours_runs_on_are_errors() -> None:
    image = CUSTOM_IMAGE.replace("eu-west-1", "us-east-1")
    for name, reason in (("ml.trn1.32xlarge", "Trainium"), ("ml.p6e-gb200.36xlarge", "Arm")):
        finding = images(image=image, instance_type=name)["image-unavailable"]
        assert (finding.where, reason in finding.message) == ("cluster.instance_type", True)


def test_parses_ecr_address() -> None:
    image = ecr_image(CUSTOM_IMAGE + "@sha256:" + "0" * 64)
    assert image is not None
    assert (image.account, image.repository, image.tag) == ("210987654321", "team/own", "1.2")
    assert image.digest == "sha256:" + "0" * 64
    assert ecr_image("pytorch/pytorch:latest") is None


def test_custom_image_with_unverifiable_requirements_is_a_warning() -> None:
    image = CUSTOM_IMAGE.replace("eu-west-1", "us-east-1")
    assert "SMDDP" in images(image=image, backend="smddp")["image-unproven"].message
    sharded = images(image=image, stages=[stage(sharding="full_shard")])
    assert "PyTorch 2.6" in sharded["image-unproven"].message


def test_framework_version_without_aws_image_is_an_error() -> None:
    assert images(framework_version="2.99")["image-unavailable"].level == "error"


def test_smddp_states_its_tradeoff() -> None:
    requested = images(date(2026, 11, 22), backend="smddp")
    assert requested.keys() == {"smddp-tradeoff", "framework-vulnerable"}
    message = requested["smddp-tradeoff"].message
    assert "PyTorch 2.5.1, which AWS has not patched since 2025-11-24" in message
    assert "2.13.0" in message
    possible = images(date(2026, 11, 22))["smddp-tradeoff"].message
    assert "auto is NCCL on PyTorch 2.13.0" in possible
    assert "SMDDP may be faster" in possible


@pytest.mark.parametrize(
    "cluster",
    [
        {"backend": "nccl"},
        {"instance_type": "ml.p5.48xlarge"},
        {"stages": [stage(instances=1)]},
        {"stages": [stage(sharding="full_shard")]},
    ],
)
def test_no_tradeoff_is_stated_where_there_is_no_choice(cluster: dict[str, Any]) -> None:
    assert images(date(2026, 11, 22), **cluster) == {}


def test_smddp_without_several_instances_is_reported() -> None:
    found = images(backend="smddp", stages=[stage(instances=1)])
    assert "every stage has one instance" in found["smddp-unused"].message


@pytest.mark.parametrize(
    ("today", "version", "level", "message"),
    [
        (date(2026, 11, 22), "2.9.0", "warning", "has not patched its images of PyTorch 2.9.0"),
        (date(2026, 11, 22), "2.10.0", "warning", "PyTorch 2.10.0 until 2027-01-21"),
        (date(2026, 11, 22), "2.14.0", "info", "not known until when"),
        (date(2027, 4, 20), None, "warning", "PyTorch 2.13.0 until 2027-07-20"),
        (date(2027, 7, 21), None, "warning", "PyTorch 2.13.0 since 2027-07-20"),
    ],
)
def test_end_of_patch_is_reported_three_months_ahead(
    today: date, version: str | None, level: str, message: str
) -> None:
    found = images(today, instance_type="ml.p5.48xlarge", framework_version=version)
    assert found["framework-unpatched"].level == level
    assert message in found["framework-unpatched"].message
    assert (version is None) == ("update sm-train" in found["framework-unpatched"].fix)


@pytest.mark.parametrize(
    ("version", "names"),
    [
        ("2.5.1", "CVE-2025-32434, CVE-2026-24747"),
        ("2.6.0", "CVE-2026-24747"),
        ("2.9.1", "CVE-2026-24747"),
        ("2.10.0", None),
        (None, None),
    ],
)
def test_vulnerabilities_of_torch_load_are_reported(version: str | None, names: str | None) -> None:
    cluster = {"instance_type": "ml.p5.48xlarge", "framework_version": version}
    for code, level in ((None, "info"), ("mine", "warning")):
        run = config(cluster=cluster, stages=[stage()], code=code)
        findings = image_findings(run, "us-east-1", date(2026, 11, 22))
        [*found] = [finding for finding in findings if finding.code == "framework-vulnerable"]
        assert [finding.level for finding in found] == ([level] if names else [])
        assert all(f"({names})" in finding.message for finding in found)


def test_image_with_cuda_13_does_not_support_v100() -> None:
    found = images(instance_type="ml.p3dn.24xlarge")["gpu-too-old"]
    assert (found.level, "V100 of ml.p3dn.24xlarge" in found.message) == ("error", True)
    assert "gpu-too-old" not in images(instance_type="ml.p3dn.24xlarge", framework_version="2.6.0")
    assert "gpu-too-old" not in images(instance_type="ml.g4dn.12xlarge")


def test_default_image_is_patched_for_six_more_months() -> None:
    assert images(date(2027, 4, 19), instance_type="ml.p5.48xlarge") == {}


@pytest.mark.parametrize(
    ("name", "instance_type", "fix"),
    [
        (
            "NCCL_ASYNC_ERROR_HANDLING",
            "ml.g5.xlarge",
            "rename it to TORCH_NCCL_ASYNC_ERROR_HANDLING",
        ),
        ("RDMAV_FORK_SAFE", "ml.p5.48xlarge", "remove it"),
        ("RDMAV_FORK_SAFE", "ml.g5.xlarge", None),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "ml.p5.48xlarge", None),
    ],
)
def test_harmful_environment_variables_are_reported(
    name: str, instance_type: str, fix: str | None
) -> None:
    found = images(instance_type=instance_type, environment={name: "1"}).get(
        "environment-deprecated"
    )
    assert (found.fix if found else None) == fix
    assert found is None or found.where == f"cluster.environment.{name}"


# ------------------------------------------------------------------ the role, quotas offline


def allow(**changes: Any) -> dict[str, Any]:
    return {
        "Effect": "Allow",
        "Principal": {"Service": "sagemaker.amazonaws.com"},
        "Action": "sts:AssumeRole",
    } | changes


@pytest.mark.parametrize(
    ("statement", "allowed"),
    [
        (allow(), True),
        ([allow()], True),
        ([allow(Principal={"Service": ["lambda.amazonaws.com", "sagemaker.amazonaws.com"]})], True),
        ([allow(Principal={"Service": "lambda.amazonaws.com"})], False),
        ([allow(Principal={"AWS": "arn:aws:iam::210987654321:root"})], False),
        ([allow(Action=["sts:TagSession"])], False),
        ([allow(Action=["sts:TagSession", "sts:*"])], True),
        ([allow(Condition={"StringEquals": {"aws:SourceAccount": "210987654321"}})], True),
        ([allow(), allow(Effect="Deny")], False),
        ([], False),
    ],
)
def test_may_assume_reads_trust_policies(statement: Any, allowed: bool) -> None:
    assert may_assume({"Version": "2012-10-17", "Statement": statement}) == allowed


@pytest.mark.parametrize(
    ("data", "level", "expected"),
    [
        ({"index": False, "samples": 10**9, "sharded": False}, "warning", "about 11.3 days"),
        ({"index": False, "samples": 1000}, "info", "headers of 1,000 samples"),
        ({"index": False}, "info", "set data.samples"),
        ({"samples": 10**9}, None, ""),
        ({"reader": "webdataset", "samples": 10**9}, None, ""),
    ],
)
def test_a_start_without_an_index_is_priced(
    data: dict[str, Any], level: str | None, expected: str
) -> None:
    found = offline(data={"uri": "s3://ai-bucket/shards/"} | data)
    finding = found.get(("start-without-index", "data.index"))
    assert (finding and finding.level) == level
    assert finding is None or expected in finding.message


def test_offline_long_runtime_is_compared_with_default_quota() -> None:
    cluster = {"instance_type": "ml.p4de.24xlarge"}
    long = config(cluster=cluster | {"max_runtime": "6d"})
    assert levels(default_runtime_findings(long)) == {"runtime-quota": "info"}
    assert levels(default_runtime_findings(config(cluster=cluster))) == {}


# ------------------------------------------------------------------ terminal output

FINDINGS = [
    Finding("error", "idle-instances", "stages[0].instances", "3 shards for [4] instances", "pack"),
    Finding("info", "small-shards", "data", "are below 2 GB", "pack larger ones"),
]


def shown(findings: list[Finding], terminal: bool) -> str:
    file = StringIO()
    show(findings, Console(file=file, force_terminal=terminal, width=60, highlight=False))
    return re.sub(r"\x1b\[[0-9;]*m", "", file.getvalue())


def test_terminal_shows_a_table_and_a_pipe_one_line_per_finding() -> None:
    first, *_ = lines = [line.rstrip() for line in shown(FINDINGS, terminal=True).splitlines()]
    assert first.split() == ["error", "idle-instances", "stages[0].instances"]
    assert lines[1].strip() == "3 shards for [4] instances"
    assert lines[2].strip() == "fix: pack"
    assert shown(FINDINGS, terminal=False).splitlines() == [
        "error    idle-instances         stages[0].instances: 3 shards for [4] instances; pack",
        "info     small-shards           data: are below 2 GB; pack larger ones",
        "not ok: the errors above would make a job fail (1 error, 0 warnings, 1 info)",
    ]
    assert shown([], terminal=True) == "ok (0 errors, 0 warnings, 0 info)\n"


# ------------------------------------------------------------------ pages


def documented() -> dict[str, tuple[str, ...]]:
    """Return the levels of each code that ``docs/checks.md`` describes, with impact and fix."""
    text = (ROOT / "docs" / "checks.md").read_text(encoding="utf-8")
    sections = text.split("\n### ")[1:]
    assert all("**Impact.** " in section and "**Fix.** " in section for section in sections)
    heads = (section.split("\n", 3) for section in sections)
    return {code: tuple(levels.strip("*").split(", ")) for code, _, levels, _ in heads}


def test_every_check_is_described() -> None:
    """With the levels that its findings may have."""
    names = (".".join(path.relative_to(ROOT).with_suffix("").parts) for path in CHECKS)
    modules = [import_module(f"sm_train.{name}") for name in names]
    values = (value for module in modules for value in vars(module).values())
    checks = [value for value in values if isinstance(value, Check)]
    assert {check.code: check.levels for check in checks} == documented()


def test_every_check_has_a_finding() -> None:
    """Findings are only created by ``Check.found``, and every check creates some."""
    used: dict[str, set[str]] = {}
    for path in (ROOT / "toolkit").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            if isinstance(node.func, ast.Name) and node.func.id == "Finding":
                assert path.name == Path(finding.__file__).name, path
            if isinstance(node.func, ast.Attribute) and node.func.attr == "found":
                texts = {
                    node_in_call.value
                    for node_in_call in ast.walk(node.args[0])
                    if isinstance(node_in_call, ast.Constant)
                }
                used.setdefault(ast.unparse(node.func.value), set()).update(texts & set(LEVELS))
    described = {
        code.upper().replace("-", "_"): set(levels) for code, levels in documented().items()
    }
    assert used == described
    assert len(described) > 40


# ------------------------------------------------------------------ alternatives and fallbacks


def offline(**changes: Any) -> dict[tuple[str, str], Finding]:
    """Return the offline findings of a run by code and ``where``."""
    run = config(**changes)
    subject = Subject(run, "us-east-1", estimate_run(run, "us-east-1"), ROOT)
    findings = offline_findings(subject, date(2025, 1, 1))
    return {(finding.code, finding.where): finding for finding in findings}


P5 = {"instance_type": "ml.p5.48xlarge", "backend": "nccl"}
P4DE = {"instance_type": "ml.p4de.24xlarge", "backend": "nccl"}
TO_P5 = {"fallbacks": [{"instance_type": "ml.p5.48xlarge"}]}


def test_memory_is_checked_on_every_possible_instance_type() -> None:
    tight = [stage(per_device_batch_size=128, gradient_accumulation_steps=1)]
    cluster = {"instance_type": "ml.p4de.24xlarge", "alternatives": ["ml.p4d.24xlarge"]}
    found = offline(cluster=cluster, stages=tight)
    assert [finding for finding in found if finding[0] == "memory-short"] == [
        ("memory-short", "cluster.alternatives")
    ]
    fallbacks = {"fallbacks": [{"instance_type": "ml.p4d.24xlarge"}]}
    found = offline(cluster={"instance_type": "ml.p4de.24xlarge"}, stages=tight, recovery=fallbacks)
    message = found["memory-short", "recovery.fallbacks[0]"].message
    assert message.startswith("ml.p4d.24xlarge in us-east-1: 256px needs about 56 GiB")
    overrides = {"256px": {"per_device_batch_size": 32}}
    fallbacks = {"fallbacks": [{"instance_type": "ml.p4d.24xlarge", "stages": overrides}]}
    found = offline(cluster={"instance_type": "ml.p4de.24xlarge"}, stages=tight, recovery=fallbacks)
    assert "memory-short" not in {code for code, _ in found}


def test_checkpoints_must_fit_on_a_node_s_disk() -> None:
    """SageMaker copies all of them to a node that resumes, a pod restores the newest one."""
    stages = [stage(instances=2)]
    size = estimate_run(config(stages=stages), "us-east-1").stages[0].stage.checkpoint_bytes
    assert size is not None
    needs = {"sagemaker": (3 + 0.5) * size, "pod": (1 + 3 / 2) * size}
    small = {"instance_type": "ml.p3.16xlarge", "volume_gb": int(needs["sagemaker"] / GB)}
    found = offline(cluster=small, stages=stages, checkpoint={"every_steps": 500, "keep_last": 2})
    volume = found["disk-short", "cluster.volume_gb"]
    assert volume.fix == f"set volume_gb: {math.ceil(1.2 * needs['sagemaker'] / GB)}"
    assert "gets all 3 of 13.9 GB" in volume.message
    enough = {**small, "volume_gb": int(needs["sagemaker"] / GB) + 1}
    checkpoint = {"every_steps": 500, "keep_last": 2}
    found = offline(cluster=enough, stages=stages, checkpoint=checkpoint)
    assert "disk-short" not in {code for code, _ in found}
    for size_text, short in (("32Gi", True), ("33Gi", False), ("34G", True), ("1T", False)):
        kubernetes = {"work_volume": {"size": size_text}}
        found = offline(stages=stages, checkpoint=checkpoint, kubernetes=kubernetes)
        assert (("disk-short", "kubernetes.work_volume.size") in found) == short, size_text
    # A shared volume is not the pod's disk.
    kubernetes = {
        "work_volume": {"size": "1Gi"},
        "checkpoints": "volume",
        "checkpoint_volume": {"claim": "shared"},
    }
    found = offline(stages=stages, checkpoint=checkpoint, kubernetes=kubernetes)
    assert "disk-short" not in {code for code, _ in found}


@pytest.mark.parametrize(
    ("quantity", "expected"),
    [("4", 4), ("500m", 0.5), ("2k", 2e3), ("1.5G", 1.5e9), ("64Gi", 64 * 2**30), ("1Ti", 2**40)],
)
def test_quantities_of_kubernetes(quantity: str, expected: float) -> None:
    assert quantity_bytes(quantity) == expected


def test_budget_is_checked_against_the_most_expensive_cluster() -> None:
    run = config(cluster=P4DE, recovery=TO_P5)
    first, [(placement, fallback)] = (
        estimate_run(run, "us-east-1"),
        alternative_costs(run, "us-east-1"),
    )
    between = (total(first)["cost_usd"] + total(fallback)["cost_usd"]) / 2
    found = offline(cluster=P4DE, recovery=TO_P5, budget={"usd": between})
    assert found["over-budget", "recovery.fallbacks[0]"].level == "warning"
    assert ("over-budget", "budget.usd") not in found
    found = offline(cluster=P4DE, recovery=TO_P5, budget={"usd": 2 * between})
    assert "over-budget" not in {code for code, _ in found}
    assert up_to_suffix(first, [(placement, fallback)]).startswith(", or up to $")
    assert up_to_suffix(fallback, [(placement, first)]) == ""


def test_derived_prices_and_budgets_without_a_price_are_reported() -> None:
    p5en = {"instance_type": "ml.p5en.48xlarge", "backend": "nccl"}
    derived = offline(cluster=p5en)["price-derived", "cluster.instance_type"]
    assert derived.level == "warning"
    # EC2's 63.296 × 1.15 = 72.79, × 0.95 to 1.15.
    assert "is derived: $69.15 to $83.71 an hour" in derived.message
    assert ("price-derived", "cluster.instance_type") not in offline(cluster=P5)
    unpriced = {"instance_type": "ml.p5e.48xlarge", "backend": "nccl"}
    found = offline(cluster=unpriced, budget={"usd": 1e6})
    assert "cannot be enforced" in found["budget-unenforceable", "budget.usd"].message
    assert ("price-unknown", "cluster.instance_type") in found
    # An unknown price is not 0: a budget below what is known is exceeded all the same.
    spot = offline(cluster=P4DE | {"capacity": "spot", "max_wait": "28d"}, budget={"usd": 1})
    assert ("over-budget", "budget.usd") in spot


def test_fallback_without_a_price_is_reported() -> None:
    cheap = {"fallbacks": [{"instance_type": "ml.p5e.48xlarge"}]}
    assert ("price-unknown", "recovery.fallbacks[0]") in offline(cluster=P5, recovery=cheap)


def test_long_spot_wait_before_a_fallback_is_reported() -> None:
    spot = P5 | {"capacity": "spot", "max_wait": "6d"}
    later = {"fallbacks": [{"capacity": "on-demand"}]}
    found = offline(cluster=spot, recovery=later)["fallback-late", "cluster.max_pending"]
    assert "waits up to 6 days" in found.message
    found = offline(cluster=spot | {"max_pending": "30m"}, recovery=later)
    assert "fallback-late" not in {code for code, _ in found}
    assert "fallback-late" not in {code for code, _ in offline(cluster=spot)}
