"""What ``check`` finds, subject by subject, in this process."""

from __future__ import annotations

import ast
import re
from datetime import date
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from sm_train.cost.json_document import as_document
from sm_train.estimators.config.schema import RunConfig
from sm_train.toolkit.checks import finding
from sm_train.toolkit.checks.finding import LEVELS, Finding
from sm_train.toolkit.checks.image import ecr_image, image_findings
from sm_train.toolkit.checks.pages import checks_by_subject, render
from sm_train.toolkit.checks.preflight import Subject, offline_findings
from sm_train.toolkit.checks.quotas import default_runtime_findings
from sm_train.toolkit.checks.recovery import recovery_findings
from sm_train.toolkit.checks.report import show
from sm_train.toolkit.checks.role import may_assume
from sm_train.toolkit.checks.shards import Shards, shard_findings
from sm_train.toolkit.costing.run_price import estimate_run
from sm_train.toolkit.costing.worst_case import fallback_costs, total, up_to_suffix

from tests.support.run_documents import config, stage

ROOT = Path(__file__).parents[3]
GB = 10**9


def priced(run: RunConfig) -> dict[str, Any]:
    return as_document(estimate_run(run, "us-east-1"))


@cache
def four_instances(machine: str = "ml.p4de.24xlarge", its: float | None = 1.8) -> dict[str, Any]:
    """The price of one stage on them."""
    stages = [stage(instances=4, steps_per_second=its)]
    return priced(config(cluster={"instance_type": machine}, stages=stages))


def levels(findings: Any) -> dict[str, str]:
    return {one.code: one.level for one in findings}


# ------------------------------------------------------------------ shards and the cluster


def dealt(
    sizes: list[int], samples: list[int] | None = None, document: dict[str, Any] | None = None
) -> dict[str, Finding]:
    """What is found of shards by code."""
    known = None if samples is None else np.array(samples)
    shards = Shards("data", "s3://b/p/", np.array(sizes), known)
    return {one.code: one for one in shard_findings(shards, document or four_instances(), 8)}


def training_usd() -> float:
    usd: float = four_instances()["stages"][0]["breakdown_usd"]["training"]
    return usd


def test_idle_instances_cost_their_share_of_the_training() -> None:
    found = dealt([3 * GB] * 3)
    idle = found["idle-instances"]
    assert (idle.level, idle.where) == ("error", "stages[0].instances")
    assert f"1 of them idle, and billed, ${training_usd() / 4:,.2f} of its training" in idle.message
    assert "shared-shards" not in found


def test_without_an_its_idle_instances_cost_dollars_a_day() -> None:
    # A machine of which neither the it/s nor the peak is known, but the price is.
    document = four_instances("ml.p6-b300.48xlarge", its=None)
    day = document["stages"][0]["cluster_per_day_usd"] / 4
    found = dealt([3 * GB] * 3, document=document)
    assert f"${day:,.0f} a day" in found["idle-instances"].message
    priceless = four_instances("ml.p5e.48xlarge", its=None)
    found = dealt([3 * GB] * 3, document=priceless)
    assert "unknown price" in found["idle-instances"].message


def test_unequal_instances_are_by_samples_where_they_are_known() -> None:
    found = dealt([3 * GB] * 8, [1000] * 7 + [3000])
    # 2,000 for three instances and 4,000 for one: all take as long as that one.
    again = 1 - (7 * 1000 + 3000) / (4 * 4000)
    message = found["unequal-instances"].message
    assert found["unequal-instances"].level == "warning"
    assert f"{again:.1%} of 256px reads samples again" in message
    assert f"${again * training_usd():,.2f} of its training" in message
    assert "divide by 4 instances, but their samples differ" in message


def test_a_shard_too_many_matters_less_the_more_there_are() -> None:
    assert dealt([3 * GB] * 9)["unequal-instances"].level == "warning"
    assert dealt([3 * GB] * 81)["unequal-instances"].level == "info"
    assert "unequal-instances" not in dealt([3 * GB] * 2001)


@given(st.integers(1, 40), st.integers(1, 6 * GB))
def test_equal_shards_that_divide_are_never_unequal(times: int, size: int) -> None:
    assert not {"unequal-instances", "idle-instances"} & set(dealt([size] * 4 * times))


@given(st.lists(st.integers(0, 6 * GB), min_size=1, max_size=60))
def test_no_set_of_shards_costs_more_than_the_training(sizes: list[int]) -> None:
    for one in dealt(sizes).values():
        assert one.fix
        if one.code == "unequal-instances":
            share = float(one.message.split("%")[0].rsplit(" ", 1)[-1])
            assert 0 < share <= 75


def test_sizes_are_held_against_two_to_five_gigabytes() -> None:
    within = [2 * GB, 5 * GB, 3 * GB, 2 * GB + 1] * 400
    assert dealt(within).keys() <= {"unequal-instances"}
    assert dealt([6 * GB, *within])["large-shards"].message.startswith("1 of 1601")
    # One that was left over at the end is no fault.
    assert "small-shards" not in dealt([*within, 10])
    assert dealt([10**9] * 1600)["small-shards"].level == "info"
    assert dealt([10**8] * 1600)["small-shards"].level == "warning"
    # There is no more data.
    assert dealt([10**6] * 4)["small-shards"].level == "info"


def test_fewer_samples_than_a_step_takes() -> None:
    assert dealt([10] * 4, [10] * 4)["few-samples"].level == "warning"
    assert "few-samples" not in dealt([10] * 4, [128] * 4)


# ------------------------------------------------------------------ interruptions


def recovery(cluster: dict[str, Any] | None = None, **changes: Any) -> dict[str, str]:
    own = {"instance_type": "ml.p4de.24xlarge", **(cluster or {})}
    run = config(cluster=own, **changes)
    return levels(recovery_findings(run, priced(run)))


def test_several_instances_without_retries() -> None:
    assert recovery({"retries": 0}) == {"no-retries": "warning"}
    alone = [stage(instances=1)]
    assert recovery({"retries": 0}, stages=alone) == {}
    assert recovery() == {}


def test_a_long_run_is_told_what_retries_do_not_cover() -> None:
    long = [stage(instances=32, max_steps=5_000_000)]
    assert recovery(stages=long)["interruptions-expected"] == "info"


def test_a_run_without_checkpoints_is_worse_on_spot_machines() -> None:
    # 100,000 iterations at 1.8 a second: 15 hours.
    one = {"stages": [stage(max_steps=100_000)], "checkpoint": {"every_steps": 100_000}}
    assert recovery(**one)["no-checkpoints"] == "warning"
    assert recovery({"capacity": "spot"}, **one)["no-checkpoints"] == "error"
    short = {"stages": [stage(max_steps=1000)], "checkpoint": {"every_steps": 1000}}
    assert recovery({"capacity": "spot"}, **short) == {}


def test_an_interval_that_costs_much_names_the_better_one() -> None:
    stages = [stage(instances=16, max_steps=2_000_000), stage("b", max_steps=1000)]
    run = config(stages=stages, checkpoint={"every_steps": 500_000})
    [found] = [
        one for one in recovery_findings(run, priced(run)) if one.code == "checkpoint-interval"
    ]
    best = priced(run)["stages"][0]["checkpoint_interval"]
    assert found.fix == f"write every_steps: {best['best_steps']}"
    assert f"${best['configured_extra_usd']:,.0f} more" in found.message
    better = config(stages=stages, checkpoint={"every_steps": best["best_steps"]})
    assert "checkpoint-interval" not in levels(recovery_findings(better, priced(better)))


# ------------------------------------------------------------------ the container

OWN = "111122223333.dkr.ecr.eu-west-1.amazonaws.com/team/own:1.2"


def images(today: date = date(2024, 6, 1), **cluster: Any) -> dict[str, Finding]:
    stages = cluster.pop("stages", [stage()])
    run = config(cluster={"instance_type": "ml.p4de.24xlarge", **cluster}, stages=stages)
    return {one.code: one for one in image_findings(run, "us-east-1", today)}


def test_an_image_of_another_region_is_an_error() -> None:
    assert "eu-west-1" in images(image=OWN)["image-region"].message
    assert images(image=OWN.replace("eu-west-1", "us-east-1")) == {}
    assert images(image="registry.example.com/own:1") == {}


def test_the_parts_of_an_ecr_address() -> None:
    image = ecr_image(OWN + "@sha256:" + "0" * 64)
    assert image is not None
    assert (image.account, image.repository, image.tag) == ("111122223333", "team/own", "1.2")
    assert image.digest == "sha256:" + "0" * 64
    assert ecr_image("pytorch/pytorch:latest") is None


def test_what_an_own_image_must_carry_is_asked() -> None:
    own = OWN.replace("eu-west-1", "us-east-1")
    assert "SMDDP" in images(image=own, backend="smddp")["image-unproven"].message
    sharded = images(image=own, stages=[stage(sharding="full_shard")])
    assert "PyTorch 2.6" in sharded["image-unproven"].message


def test_a_version_that_aws_has_no_image_of() -> None:
    assert images(framework_version="2.99")["image-unavailable"].level == "error"


def test_smddp_that_is_not_used_is_said() -> None:
    assert images() == {}
    unused = images(framework_version="2.6.0")["smddp-unused"]
    assert "PyTorch 2.6.0" in unused.message
    assert images(backend="nccl") == {}
    alone = images(backend="smddp", stages=[stage(instances=1)])
    assert "one instance" in alone["smddp-unused"].message
    assert images(instance_type="ml.p5.48xlarge") == {}


def test_images_that_are_not_patched_any_more() -> None:
    later = date(2026, 11, 1)
    assert images(later)["framework-unpatched"].level == "info"
    assert images(later, framework_version="2.9.0")["framework-unpatched"].level == "warning"
    assert "framework-unpatched" not in images(later, backend="nccl")
    assert "framework-unpatched" in images(date(2027, 2, 1), backend="nccl")


@pytest.mark.parametrize(
    ("name", "machine", "fix"),
    [
        ("NCCL_ASYNC_ERROR_HANDLING", "ml.g5.xlarge", "write TORCH_NCCL_ASYNC_ERROR_HANDLING"),
        ("RDMAV_FORK_SAFE", "ml.p5.48xlarge", "take it out"),
        ("RDMAV_FORK_SAFE", "ml.g5.xlarge", None),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "ml.p5.48xlarge", None),
    ],
)
def test_variables_that_are_not_to_be_set(name: str, machine: str, fix: str | None) -> None:
    found = images(instance_type=machine, environment={name: "1"}).get("environment-deprecated")
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
    ("statement", "may"),
    [
        (allow(), True),
        ([allow()], True),
        ([allow(Principal={"Service": ["lambda.amazonaws.com", "sagemaker.amazonaws.com"]})], True),
        ([allow(Principal={"Service": "lambda.amazonaws.com"})], False),
        ([allow(Principal={"AWS": "arn:aws:iam::111122223333:root"})], False),
        ([allow(Action=["sts:TagSession"])], False),
        ([allow(Action=["sts:TagSession", "sts:*"])], True),
        ([allow(Condition={"StringEquals": {"aws:SourceAccount": "111122223333"}})], True),
        ([allow(), allow(Effect="Deny")], False),
        ([], False),
    ],
)
def test_who_may_assume_a_role(statement: Any, may: bool) -> None:
    assert may_assume({"Version": "2012-10-17", "Statement": statement}) == may


def test_offline_a_long_runtime_is_held_against_the_default_quota() -> None:
    cluster = {"instance_type": "ml.p4de.24xlarge"}
    long = config(cluster=cluster | {"max_runtime": "6d"})
    assert levels(default_runtime_findings(long)) == {"runtime-quota": "info"}
    assert levels(default_runtime_findings(config(cluster=cluster))) == {}


# ------------------------------------------------------------------ what a person sees

FOUND = [
    Finding("error", "idle-instances", "stages[0].instances", "3 shards for [4] instances", "pack"),
    Finding("info", "small-shards", "data", "are below 2 GB", "pack larger ones"),
]


def shown(findings: list[Finding], terminal: bool) -> str:
    file = StringIO()
    show(findings, Console(file=file, force_terminal=terminal, width=60, highlight=False))
    return re.sub(r"\x1b\[[0-9;]*m", "", file.getvalue())


def test_a_terminal_has_a_table_and_a_log_a_line_for_each_finding() -> None:
    first, *_ = lines = [line.rstrip() for line in shown(FOUND, terminal=True).splitlines()]
    assert first.split() == ["error", "idle-instances", "stages[0].instances"]
    assert lines[1].strip() == "3 shards for [4] instances"
    assert lines[2].strip() == "→ pack"
    assert shown(FOUND, terminal=False).splitlines() == [
        "error    idle-instances         stages[0].instances: 3 shards for [4] instances; pack",
        "info     small-shards           data: are below 2 GB; pack larger ones",
        "not ok: errors above would cost a job (1 error, 0 warnings, 1 info)",
    ]
    assert shown([], terminal=True) == "ok (0 errors, 0 warnings, 0 info)\n"


# ------------------------------------------------------------------ pages


def test_the_pages_are_those_of_the_code() -> None:
    assert (ROOT / "docs" / "checks.md").read_text(encoding="utf-8") == render()


def test_every_finding_has_a_page_and_every_page_a_finding() -> None:
    """Findings are made by a check's ``found`` alone, and every check makes some."""
    used: dict[str, set[str]] = {}
    for path in (ROOT / "toolkit").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            if isinstance(node.func, ast.Name) and node.func.id == "Finding":
                assert path.name == Path(finding.__file__).name, path
            if isinstance(node.func, ast.Attribute) and node.func.attr == "found":
                texts = {
                    one.value for one in ast.walk(node.args[0]) if isinstance(one, ast.Constant)
                }
                used.setdefault(ast.unparse(node.func.value), set()).update(texts & set(LEVELS))
    documented = {
        one.code.upper().replace("-", "_"): set(one.levels)
        for checks in checks_by_subject().values()
        for one in checks
    }
    assert used == documented
    assert len(documented) > 40


# ------------------------------------------------------------------ other machines, other places


def described(**changes: Any) -> dict[tuple[str, str], Finding]:
    """What the run file and the prices say, by code and place."""
    own = config(**changes)
    subject = Subject(own, "us-east-1", estimate_run(own, "us-east-1"), ROOT)
    found = offline_findings(subject, date(2025, 1, 1))
    return {(one.code, one.where): one for one in found}


P5 = {"instance_type": "ml.p5.48xlarge", "backend": "nccl"}
TO_P4DE = {"fallbacks": [{"instance_type": "ml.p4de.24xlarge"}]}


def test_a_stage_must_fit_on_every_machine_that_it_may_be_given() -> None:
    tight = [stage(per_device_batch_size=128, gradient_accumulation_steps=1)]
    machines = {"instance_type": "ml.p4de.24xlarge", "alternatives": ["ml.p4d.24xlarge"]}
    found = described(cluster=machines, stages=tight)
    assert [one for one in found if one[0] == "memory-short"] == [
        ("memory-short", "cluster.alternatives")
    ]
    elsewhere = {"fallbacks": [{"instance_type": "ml.p4d.24xlarge"}]}
    found = described(
        cluster={"instance_type": "ml.p4de.24xlarge"}, stages=tight, recovery=elsewhere
    )
    said = found["memory-short", "recovery.fallbacks[0]"].message
    assert said.startswith("ml.p4d.24xlarge in us-east-1: 256px takes about 52 GiB")
    own = {"256px": {"per_device_batch_size": 32}}
    elsewhere = {"fallbacks": [{"instance_type": "ml.p4d.24xlarge", "stages": own}]}
    found = described(
        cluster={"instance_type": "ml.p4de.24xlarge"}, stages=tight, recovery=elsewhere
    )
    assert "memory-short" not in {code for code, _ in found}


def test_the_budget_is_held_against_the_dearest_machines() -> None:
    run = config(cluster=P5, recovery=TO_P4DE)
    own, [(place, there)] = estimate_run(run, "us-east-1"), fallback_costs(run, "us-east-1")
    between = (total(own)["cost_usd"] + total(there)["cost_usd"]) / 2
    found = described(cluster=P5, recovery=TO_P4DE, budget={"usd": between})
    assert found["over-budget", "recovery.fallbacks[0]"].level == "warning"
    assert ("over-budget", "budget.usd") not in found
    found = described(cluster=P5, recovery=TO_P4DE, budget={"usd": 2 * between})
    assert "over-budget" not in {code for code, _ in found}
    assert up_to_suffix(own, [(place, there)]).startswith(", or up to $")
    assert up_to_suffix(there, [(place, own)]) == ""


def test_another_machine_whose_price_nobody_knows_is_named() -> None:
    cheap = {"fallbacks": [{"instance_type": "ml.p5e.48xlarge"}]}
    assert ("price-unknown", "recovery.fallbacks[0]") in described(cluster=P5, recovery=cheap)


def test_a_place_where_the_run_would_start_another_way() -> None:
    to_p5 = {"fallbacks": [{"instance_type": "ml.p5.48xlarge"}]}
    found = described(recovery=to_p5)["fallback-start", "recovery.fallbacks[0]"]
    assert (found.level, found.fix) == ("error", "write cluster.backend: nccl, which both can")


def test_spot_machines_that_are_waited_for_keep_a_run_from_going_elsewhere() -> None:
    spot = P5 | {"capacity": "spot", "max_wait": "6d"}
    later = {"fallbacks": [{"capacity": "on-demand"}]}
    found = described(cluster=spot, recovery=later)["fallback-late", "cluster.max_pending"]
    assert "as long as 6 days" in found.message
    found = described(cluster=spot | {"max_pending": "30m"}, recovery=later)
    assert "fallback-late" not in {code for code, _ in found}
    assert "fallback-late" not in {code for code, _ in described(cluster=spot)}
