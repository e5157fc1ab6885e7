"""What limits the speed of a stage: the shares of an optimizer step by the speed model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from sm_train.cost.speed_model import step_seconds
from sm_train.cost.stage import CostStage

Resource = Literal["compute", "memory", "network", "launches"]
RESOURCES: tuple[Resource, ...] = get_args(Resource)


@dataclass(frozen=True)
class StepShares:
    """Shares of a step's predicted seconds, which sum to 1.

    ``compute`` is arithmetic at the efficiency that matrix products reach, ``memory`` the bytes
    that other kernels and the optimizer move, ``network`` the communication that compute does not
    hide, and ``launches`` the time in which kernels are launched and the GPU waits.
    """

    compute: float
    memory: float
    network: float
    launches: float

    @property
    def limit(self) -> Resource:
        """The largest share."""
        return max(RESOURCES, key=lambda resource: getattr(self, resource))

    def describe(self) -> str:
        """Return the shares as a phrase, the largest first; shares below 0.5 % are left out."""
        shares = {resource: getattr(self, resource) for resource in RESOURCES}
        return ", ".join(
            f"{resource} {share:.0%}"
            for resource, share in sorted(shares.items(), key=lambda item: -item[1])
            if share >= 0.005
        )


def step_shares(stage: CostStage) -> StepShares | None:
    """Return the shares of a stage's step; None if the model's or the GPU's figures are unknown."""
    if stage.work is None or stage.gpu is None:
        return None
    seconds = step_seconds(stage.work, stage.gpu, stage.network)
    return StepShares(
        compute=seconds.arithmetic / seconds.total,
        memory=(seconds.memory + seconds.optimizer) / seconds.total,
        network=seconds.exposed_communication / seconds.total,
        launches=seconds.launch / seconds.total,
    )
