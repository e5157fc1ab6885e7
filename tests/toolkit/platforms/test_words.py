"""Texts about a run on a cluster do not speak of another platform."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
import yaml
from sm_train.estimators.config.schema import RunConfig

from tests.conftest import Cli
from tests.support.cluster.stored_run import StoredRun
from tests.support.run_documents import run

pytestmark = pytest.mark.integration

OWN = "own.8xH100-SXM5-80GB.3200gbps.24usd"
OTHERS = re.compile(
    r"SageMaker|warm.pool|\bspot\b|\bml\.|CloudWatch|\bAWS\b|training job", re.IGNORECASE
)
"""What only SageMaker has."""

AGE, STATES, CODES = 900.0, ("ended", "ended"), (0, 0)
ENDS = {
    "live": (20.0, ("training", "training"), (None, None)),
    "failed": (AGE, STATES, (1, 0)),
    "done": (AGE, STATES, CODES),
    "lost": (9000.0, ("training", "training"), (None, None)),
}
"""How an attempt is: the age of its newest heartbeats, the states and exit codes of its nodes."""

COMMANDS = (
    *(("status",), ("watch", "--once"), ("review",), ("diagnose",), ("cost", "--actual")),
    *(("logs",), ("stop",), ("list",)),
)
FILE_COMMANDS = (("cost",), ("cost", "--explain"), ("check", "--offline"))


def stored_run(folder: Path, name: str, platform: str) -> StoredRun:
    """Return a run of two nodes of the user's own, and write its file."""
    document = run(stages=[run()["stages"][0] | {"name": "256px", "instances": 2}])
    document |= {"name": name, "region": "us-east-1"}
    document["cluster"]["instance_type"] = OWN
    document["kubernetes"] = {"image": "registry.example.com/train:1"}
    document["slurm"] = {"shared_folder": str(folder / "shared")}
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(document))
    place = folder / "shared" / name / "checkpoints"
    return StoredRun(place, RunConfig.model_validate(document))


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("platform", ["slurm", "kubernetes"])
def test_no_output_about_a_cluster_names_what_only_sagemaker_has(
    cli: Cli, tmp_path: Path, platform: str, end: str
) -> None:
    name, (age, states, codes) = f"art-{end}", ENDS[end]
    stored = stored_run(tmp_path, name, platform)
    stored.attempt(time.time() - age, platform=platform, states=states, codes=codes)  # type: ignore[arg-type]
    stored.checkpoint(100)
    calls = [(command[0], str(stored.folder), *command[1:]) for command in COMMANDS]
    calls += [(command[0], f"{name}.yaml", *command[1:]) for command in FILE_COMMANDS]
    found = []
    for call in calls:
        done = cli(*call)
        assert "Traceback" not in done.stderr
        lines = f"{done.stdout}{done.stderr}".splitlines()
        found += [f"{call[0]}: {line}" for line in lines if OTHERS.search(line)]
    assert found == []
