"""What options of a step save, counted in bytes and FLOPs by the presets' plans.

python benchmarks/step_options.py
"""

from __future__ import annotations

from sm_train.cost.network import GpuNetwork, step_collectives
from sm_train.entrypoints.job_interface.job_config import Modulation
from sm_train.entrypoints.planning.memory import ModelPlan, plan_preset

PRESETS = (
    ("sd2", 512),
    ("dit-xl", 512),
    ("mmdit-2b", 512),
    ("mmdit-8b", 1024),
    ("mmdit-20b", 1024),
)
CLUSTER = GpuNetwork(nodes=16, per_node=8, between_nodes=50e9, inside_node=300e9)
GB = 1e9


def main() -> None:
    """Print a line for each preset."""
    header = (
        "full_shard: GB a GPU and pass, modulation gathered / exchanged",
        "forward FLOPs in fp8, speed of arithmetic at most",
        "text encoders: GB a GPU, replicated / sharded over 8 / cpu",
    )
    print(f"| preset | {' | '.join(header)} |\n|---|---|---|---|")
    for preset, resolution in PRESETS:
        plans = {
            modulation: plan_preset(preset, resolution, precision="bf16", modulation=modulation)
            for modulation in _MODULATION
        }
        plan = plans["gathered"]
        gathered, exchanged = (traffic(plans[modulation]) / GB for modulation in _MODULATION)
        in_fp8 = 3 * plan.fp8.flops / plan.training_flops_per_image
        replicated, sharded, on_cpu = (
            (plan.frozen_bytes(placement, 8) - plan.vae_bytes) / GB
            for placement in ("replicated", "sharded", "cpu")
        )
        print(
            f"| `{preset}`, {resolution} px | {gathered:.2f} / {exchanged:.2f} = "
            f"{gathered / exchanged:.2f} × | {in_fp8:.0%}, {1 / (1 - in_fp8 / 2):.2f} × | "
            f"{replicated:.2f} / {sharded:.2f} / {on_cpu:.2f} |"
        )


_MODULATION: tuple[Modulation, ...] = ("gathered", "exchanged")


def traffic(plan: ModelPlan) -> float:
    """Return the bytes that a pass gathers and scatters."""
    moved = plan.parameters - plan.exchanged_parameters
    units = plan.communication_units("full_shard")
    calls = step_collectives("full_shard", moved, CLUSTER, units=units)
    return sum(call.bytes * call.count * call.passes for call in calls)


if __name__ == "__main__":
    main()
