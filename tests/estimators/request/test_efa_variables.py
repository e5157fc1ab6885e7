"""The table of variables for EFA in docs/jobs.md, against requests, launcher and AWS's toolkit."""

from __future__ import annotations

import re

import pytest
from sm_train.cost.instances import instance_type, instance_types

from tests.estimators.request.efa_variables_support import EFA_VARIABLE, ROOT, documented
from tests.estimators.request.training_support import requests
from tests.support.run_documents import config


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
