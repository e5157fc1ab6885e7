"""Fields that the user adds to a request: at any depth, and none that another key sets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from sm_train.estimators.request.request_patch import (
    RequestPatchError,
    with_additions,
    without_additions,
)

from tests.conftest import Cli
from tests.support.run_files import one_line, write_run

P4DE = {"instance_type": "ml.p4de.24xlarge", "backend": "nccl"}
REQUEST = {"RoleArn": "r", "ResourceConfig": {"InstanceCount": 2}, "Tags": [{"Key": "a"}]}


@pytest.mark.parametrize(
    "added",
    [
        {},
        {"SessionChainingConfig": {"EnableSessionTagChaining": True}},
        {"ResourceConfig": {"InstancePlacementConfig": {"EnableMultipleJobs": True}}},
    ],
)
def test_what_was_added_can_be_left_out_again(added: dict[str, Any]) -> None:
    made = with_additions(REQUEST, added)
    assert without_additions(made, added) == REQUEST
    assert made["ResourceConfig"]["InstanceCount"] == 2


@pytest.mark.parametrize(
    ("added", "name"),
    [
        ({"RoleArn": "other"}, "RoleArn"),
        ({"Tags": []}, "Tags"),
        ({"ResourceConfig": {"InstanceCount": 3}}, "ResourceConfig.InstanceCount"),
        ({"ResourceConfig": None}, "ResourceConfig"),
    ],
)
def test_a_field_that_another_key_sets_is_refused(added: dict[str, Any], name: str) -> None:
    with pytest.raises(RequestPatchError, match=f"{name} is in the request already"):
        with_additions(REQUEST, added)


@pytest.mark.parametrize(
    ("patch", "code", "problem"),
    [
        ({"RoleArn": "other"}, 2, "RoleArn is set by role; write that instead"),
        ({"EnableManagedSpotTraining": True}, 2, "is set by cluster.capacity; write that"),
        (
            {"ResourceConfig": {"KeepAlivePeriodInSeconds": 3600}},
            2,
            "ResourceConfig.KeepAlivePeriodInSeconds is set by cluster.keep_alive_period",
        ),
        (
            {"ProfilerConfig": {"DisableProfiler": False}},
            2,
            "ProfilerConfig.DisableProfiler is in the request already",
        ),
        ({"SessionChaining": {}}, 3, 'Unknown parameter in input: "SessionChaining"'),
        ({"ExperimentConfig": {"TrialName": 3}}, 3, "ExperimentConfig.TrialName"),
    ],
)
def test_submit_refuses_a_patch_that_sagemaker_would_reject(
    cli: Cli, tmp_path: Path, patch: dict[str, Any], code: int, problem: str
) -> None:
    path = write_run(tmp_path, cluster=P4DE | {"request_patch": patch})
    refused = cli("submit", path, "--dry-run")
    assert refused.returncode == code
    assert problem in one_line(refused.stderr)
    found = json.loads(cli("check", path, "--offline", "--json").stdout)["findings"]
    # A key of the run file that sets the field is known when the file is read.
    [finding] = [each for each in found if each["code"] in ("request-patch", "run-file")]
    assert problem in f"{finding['message']}; {finding['fix']}"


def test_the_plan_shows_the_whole_request(cli: Cli, tmp_path: Path) -> None:
    patch = {"SessionChainingConfig": {"EnableSessionTagChaining": True}}
    path = write_run(tmp_path, cluster=P4DE | {"request_patch": patch})
    request = json.loads(cli("submit", path, "--dry-run", "--json").stdout)["requests"][0]
    assert request["SessionChainingConfig"] == patch["SessionChainingConfig"]
    assert request["InfraCheckConfig"] == {"EnableInfraCheck": True}
    shown = cli("submit", path, "--dry-run")
    assert 'adds {"SessionChainingConfig": {"EnableSessionTagChaining": true}}' in " ".join(
        shown.stdout.split()
    )
