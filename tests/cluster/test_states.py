"""The memory plan of the training state against what real processes allocate."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from sm_train.entrypoints.planning.memory import plan_preset

from tests.support.cluster.training_jobs import free_port, start_python, tiny_run
from tests.support.deadline import DEADLINE
from tests.support.run_documents import write_job_file

SCRIPT = Path(__file__).parents[1] / "support" / "cluster" / "count_states.py"


@pytest.mark.parametrize(
    ("preset", "strategy"),
    [
        ("tiny-mmdit", "full_shard"),
        *(
            pytest.param(preset, strategy, marks=pytest.mark.slow)
            for preset, strategy in (
                ("tiny-mmdit", "none"),
                ("tiny-sdxl", "none"),
                ("tiny-sdxl", "full_shard"),
                ("tiny-sdxl", "shard_grad_op"),
                ("tiny-mmdit", "shard_grad_op"),
            )
        ),
    ],
)
def test_allocated_state_matches_the_plan(tmp_path: Path, preset: str, strategy: str) -> None:
    """Within 10 %: the rows of small weights do not divide evenly by the number of processes.

    Under accumulation, unsharded gradients are reduce-scattered once a step and unsharded weights
    gathered once; the sums are the same.
    """
    run = tiny_run(preset=preset, max_steps=1, sharding=strategy)
    job_file = write_job_file(tmp_path, run)
    launch = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port"]
    process = start_python(
        [*launch, str(free_port()), str(SCRIPT), str(job_file), str(tmp_path)],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
    )
    assert process.stdout is not None
    output = process.stdout.read()
    assert process.wait(DEADLINE) == 0, output
    plan = plan_preset(preset, 8, precision="fp32")
    expected = plan.state_bytes(ema=True, strategy=strategy, world_size=2, per_node=2)
    for rank in (0, 1):
        results = json.loads((tmp_path / f"rank-{rank}.json").read_text())
        for part in ("weights", "gradients", "optimizer", "ema"):
            assert results[part] == pytest.approx(getattr(expected, part), rel=0.1), part
        if strategy != "none":
            unsharded, sharded = (
                {
                    name.split(",")[0]: value
                    for name, value in results.items()
                    if name.endswith(f"unsharded_grads: {unsharded_grads}")
                }
                for unsharded_grads in (True, False)
            )
            assert unsharded["norm"] == pytest.approx(sharded["norm"], rel=1e-6)
            assert unsharded["norm"] > 0
            blocks = unsharded["_reduce_scatter_base_"]
            assert sharded["_reduce_scatter_base_"] == 3 * blocks
            # full_shard gathers each block for each of the six passes.
            gathers = 1 if strategy == "shard_grad_op" else 6
            for collectives in (unsharded, sharded):
                assert collectives["_allgather_base_"] == gathers * blocks
