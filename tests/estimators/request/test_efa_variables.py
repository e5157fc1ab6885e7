"""The table of variables for EFA in docs/jobs.md, against requests, launcher and AWS's toolkit."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from sm_train.cost.instances import instance_type, instance_types

from tests.estimators.request.test_training import requests
from tests.support.run_documents import config

ROOT = Path(__file__).parents[3]
EFA_VARIABLE = re.compile(r"\b(?:FI_[A-Z_]+|RDMAV_[A-Z_]+|NCCL_PROTO|NCCL_NET(?:_PLUGIN)?)\b")


def documented() -> dict[str, tuple[str, set[str]]]:
    """Return what the table says: type → set by us, set by AWS's toolkit."""
    text = (ROOT / "docs" / "jobs.md").read_text()
    table = text.split("### Variables for EFA")[1].split("\n\n")[1]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]
    return {
        name: (ours, set(re.findall(r"`([^`]+)`", toolkit)))
        for names, ours, toolkit in rows
        for name in names.split(", ")
    }


def test_table_lists_every_gpu_type_with_efa() -> None:
    types = {kind.name for kind in instance_types() if kind.supports_efa}
    assert documented().keys() == {name for name in types if not name.startswith("ml.trn")}
    assert all(ours == "nothing" for ours, _ in documented().values())
    for name, (_, toolkit) in documented().items():
        assert bool(toolkit) == instance_type(name).supports_smddp


@pytest.mark.parametrize("name", sorted(documented()))
def test_requests_set_no_variable_of_efa(name: str) -> None:
    [request] = requests(config(cluster={"instance_type": name}))
    assert not [key for key in request["Environment"] if EFA_VARIABLE.fullmatch(key)]


def test_training_code_sets_no_variable_of_efa() -> None:
    """Comments and messages may name them; a string that is exactly the name would set it."""
    for path in (ROOT / "entrypoints").rglob("*.py"):
        for literal in re.findall(r"[\"'](\w+)[\"']", path.read_text()):
            assert not EFA_VARIABLE.fullmatch(literal), f"{path}: {literal}"
