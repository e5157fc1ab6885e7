"""The platform's resource configuration, and its absence on a laptop."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from sm_train.entrypoints.base.sagemaker_paths import (
    ResourceConfig,
    SageMakerPaths,
    host_name,
    host_names,
    stays_below,
)


def test_resource_config_names_instances_and_a_laptop_is_one(tmp_path: Path) -> None:
    paths = SageMakerPaths(tmp_path)
    assert ResourceConfig.read(paths) == ResourceConfig("algo-1", ("algo-1",), None)
    paths.input_config.mkdir(parents=True)
    document = {
        "current_host": "algo-2",
        "current_instance_type": "ml.p5.48xlarge",
        "hosts": ["algo-2", "algo-10", "algo-1"],
    }
    (paths.input_config / "resourceconfig.json").write_text(json.dumps(document))
    resources = ResourceConfig.read(paths)
    assert resources.hosts == ("algo-1", "algo-10", "algo-2"), "sorted as AWS's own launchers do"
    assert (resources.node_rank, resources.instance_type) == (2, "ml.p5.48xlarge")


def test_host_names_are_sorted_as_text() -> None:
    """As AWS sorts them: with ten nodes the second rank runs on algo-10."""
    assert host_names(3) == ["algo-1", "algo-2", "algo-3"]
    assert host_names(11)[:4] == ["algo-1", "algo-10", "algo-11", "algo-2"]
    assert [host_name(1, nodes) for nodes in (0, 9, 10)] == ["algo-2", "algo-2", "algo-10"]


@pytest.mark.parametrize("name", ["a", "a/b.json", "..a/b..", "a//b", "a/./b", "…"])
def test_names_below_the_folder(name: str) -> None:
    assert stays_below(name)


@pytest.mark.parametrize("name", ["/etc/passwd", "..", "../a", "a/../../b", "a/..", "//a", "a\0b"])
def test_names_that_lead_out_of_the_folder(name: str) -> None:
    assert not stays_below(name)
