"""The platform's resource configuration, and its absence on a laptop."""

from __future__ import annotations

import json
from pathlib import Path

from sm_train.entrypoints.common.sagemaker_paths import ResourceConfig, SageMakerPaths


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
