"""Which jobs compile their network, and why."""

from __future__ import annotations

from typing import Any

import pytest
from sm_train.entrypoints.job_interface.job_config import choose_compile
from sm_train.estimators.request.launch_plan import compile_choice

from tests.support.run_documents import config

MEASURED = {"gpu": True, "pytorch": "2.13.0+cu130", "shapes_vary": False, "adapter": False}


def test_auto_compiles_what_was_measured() -> None:
    assert choose_compile("auto", **MEASURED).compiled


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"gpu": False}, "no GPU"),
        ({"pytorch": "2.5.1"}, "not measured with this PyTorch"),
        ({"pytorch": None}, "PyTorch is unknown"),
        ({"shapes_vary": True}, "data.aspect_buckets"),
        ({"adapter": True}, "model.lora"),
    ],
)
def test_auto_leaves_out_what_was_not(change: dict[str, Any], reason: str) -> None:
    chosen = choose_compile("auto", **(MEASURED | change))
    assert not chosen.compiled
    assert reason in chosen.reason
    # The run file's own choice always counts.
    assert choose_compile(True, **(MEASURED | change)).compiled
    assert not choose_compile(False, **MEASURED).compiled


def test_a_laptop_decides_as_the_job_does() -> None:
    assert compile_choice(config(training={})).compiled
    # SMDDP's image has PyTorch 2.5, and one of the user's own an unknown one.
    image = "111122223333.dkr.ecr.us-east-1.amazonaws.com/own:1"
    for cluster in ({"backend": "smddp"}, {"image": image}):
        run = config(cluster={"instance_type": "ml.p4de.24xlarge"} | cluster, training={})
        assert not compile_choice(run).compiled
    assert not compile_choice(config()).compiled
