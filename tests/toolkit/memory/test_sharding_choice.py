"""``sharding: auto``: the choice, what it depends on, and that the run records it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sm_train.cost.instances import instance_type, instance_types
from sm_train.estimators.bundle.bundle import run_document
from sm_train.estimators.config.schema import RunConfig
from sm_train.toolkit.memory.memory_fit import fits, memory_fit
from sm_train.toolkit.memory.sharding_choice import with_sharding
from sm_train.toolkit.run_file.run_file import load, load_recorded

from tests.conftest import Cli
from tests.support.run_documents import config, job_document, stage
from tests.support.run_files import write_run

STRATEGIES = ("none", "hybrid_shard", "full_shard")
GPU_TYPES = sorted(
    kind.name for kind in instance_types() if kind.trains and kind.accelerator_memory_gib
)


def automatic(path: Path, **changes: Any) -> RunConfig:
    """Load a run file that leaves ``sharding`` to its default."""
    stages = changes.pop("stages", [stage(steps_per_second=None)])
    for keys in stages:
        del keys["sharding"]
    return with_sharding(load(write_run(path, stages=stages, **changes)))


def test_a_load_only_reads(tmp_path: Path) -> None:
    """It plans no memory, for which a model without a plan is built in a process of its own."""
    keys = stage(steps_per_second=None)
    del keys["sharding"]
    path = write_run(tmp_path, stages=[keys])
    program = (
        "import sys\n"
        "starts = ('subprocess.Popen', 'os.fork', 'os.posix_spawn')\n"
        "sys.addaudithook(lambda event, _: print(event) if event in starts else None)\n"
        "from pathlib import Path\n"
        "from sm_train.toolkit.run_file.run_file import load\n"
        f"print(load(Path({str(path)!r})).stages[0].sharding)\n"
        "print('sm_train.toolkit.memory.memory_fit' in sys.modules)"
    )
    command = [sys.executable, "-c", program]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True)
    assert loaded.stdout == "auto\nFalse\n"


@pytest.mark.parametrize(
    ("preset", "kind", "instances", "strategy"),
    [
        ("sd2", "ml.p4de.24xlarge", 4, "none"),
        ("mmdit-8b", "ml.p5en.48xlarge", 4, "hybrid_shard"),
        ("mmdit-20b", "ml.p4de.24xlarge", 16, "full_shard"),
        ("mmdit-20b", "ml.p4de.24xlarge", 1, "full_shard"),
    ],
)
def test_the_strategy_with_the_least_communication_that_fits(
    tmp_path: Path, preset: str, kind: str, instances: int, strategy: str
) -> None:
    run = automatic(
        tmp_path,
        model={"preset": preset},
        cluster={"instance_type": kind},
        stages=[stage(instances=instances, per_device_batch_size=4, steps_per_second=None)],
    )
    [chosen] = run.stages
    assert chosen.sharding == strategy
    need = memory_fit(run, chosen)
    assert need is not None
    assert f"{need.gib:.0f} GiB of each GPU's" in (chosen.sharding_reason or "")


@given(
    kind=st.sampled_from(GPU_TYPES),
    preset=st.sampled_from(["sd2", "sdxl", "dit-xl", "mmdit-2b", "mmdit-8b", "mmdit-20b"]),
    instances=st.sampled_from([1, 2, 16]),
    images=st.sampled_from([1, 8, 32]),
)
def test_an_earlier_strategy_never_fits(
    kind: str, preset: str, instances: int, images: int
) -> None:
    keys = stage(instances=instances, per_device_batch_size=images, steps_per_second=None)
    document = run_document(
        config(model={"preset": preset}, cluster={"instance_type": kind}, stages=[keys])
    )
    document["stages"][0]["sharding"] = "auto"
    run = with_sharding(load_recorded(document, (), "demo"))
    [chosen] = run.stages
    if instances * instance_type(kind).accelerators == 1:
        assert chosen.sharding == "none"
        return
    earlier = STRATEGIES[: STRATEGIES.index(chosen.sharding)]
    assert not any(fits(run, chosen, sharding=strategy) for strategy in earlier)
    if not fits(run, chosen):
        assert chosen.sharding == "full_shard"


@pytest.mark.parametrize(
    ("changes", "strategy", "reason"),
    [
        ({"training": {"optimizer": {"name": "muon"}}}, "none", "FSDP2 shards their rows"),
        (
            {"cluster": {"instance_type": "ml.p4de.24xlarge", "backend": "smddp"}},
            "none",
            "FSDP2 needs a newer PyTorch than SMDDP's",
        ),
        ({"cluster": {"instance_type": "ml.g5.2xlarge"}}, "none", "there is one GPU"),
    ],
    ids=["whole-weights", "smddp", "one-gpu"],
)
def test_runs_that_cannot_be_sharded_are_not(
    tmp_path: Path, changes: dict[str, Any], strategy: str, reason: str
) -> None:
    stages = [stage(instances=1 if "g5" in str(changes) else 4, steps_per_second=None)]
    [chosen] = automatic(tmp_path, model={"preset": "mmdit-8b"}, stages=stages, **changes).stages
    assert chosen.sharding == strategy
    assert reason in (chosen.sharding_reason or "")


def test_a_recorded_choice_stays_on_another_cluster(tmp_path: Path) -> None:
    small = {"instance_type": "ml.g5.48xlarge"}
    run = automatic(tmp_path, model={"preset": "mmdit-2b"}, cluster=small)
    [recorded] = run.stages
    assert recorded.sharding != "none"
    document = json.loads(json.dumps(run_document(run)))
    change = ["cluster.instance_type=ml.p5.48xlarge"]
    [resumed] = with_sharding(load_recorded(document, change, "demo")).stages
    assert (resumed.sharding, resumed.sharding_reason) == (recorded.sharding, None)
    # Unless the user asks for a new choice.
    change.append("stages.0.sharding=auto")
    [again] = with_sharding(load_recorded(document, change, "demo")).stages
    assert again.sharding == "none"


def test_the_job_learns_the_choice_and_its_reason(tmp_path: Path) -> None:
    run = automatic(tmp_path)
    [job] = job_document(run).values()
    assert job["stage"]["sharding"] == "none"
    assert job["stage"]["sharding_reason"] == f"auto: {run.stages[0].sharding_reason}"


def test_submit_shows_the_choice(cli: Cli, tmp_path: Path) -> None:
    keys = stage()
    del keys["sharding"]
    result = cli("submit", write_run(tmp_path, stages=[keys]), "--dry-run", env={"COLUMNS": "200"})
    assert result.returncode == 0, result.stderr
    [line] = [line for line in result.stdout.splitlines() if line.startswith("  sharding")]
    assert "256px none: " in line
    assert line.rstrip().endswith("GiB of each GPU's 80")


def test_alternatives_choose_for_each_cluster(cli: Cli, tmp_path: Path) -> None:
    keys = stage(steps_per_second=None, per_device_batch_size=4)
    run = write_run(tmp_path, model={"preset": "mmdit-2b"}, stages=[keys | {"sharding": "auto"}])
    shown = json.loads(cli("cost", run, "--alternatives", "--json").stdout)["alternatives"]
    chosen = {found["instance_type"]: found["sharding"] for found in shown}
    assert chosen["ml.p4de.24xlarge"] == ["none"]
    assert chosen["ml.g5.48xlarge"] != ["none"]
    fixed = write_run(tmp_path, model={"preset": "mmdit-2b"}, stages=[keys])
    shown = json.loads(cli("cost", fixed, "--alternatives", "--json").stdout)["alternatives"]
    assert {tuple(found["sharding"]) for found in shown} == {("none",)}
