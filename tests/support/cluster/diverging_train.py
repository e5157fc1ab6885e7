"""``train.py`` whose loss is NaN on one rank for some passes; run from a copy in the bundle.

``DIVERGE=RANK:FIRST:LAST`` names the passes, counted from 1 in each process. With ``LOSE_FOLDER``
that rank also removes its node's checkpoint folder in the last of them.
"""

from __future__ import annotations

import os
import shutil
from typing import Any

from sm_train.entrypoints.base.sagemaker_paths import SageMakerPaths
from sm_train.entrypoints.training import train
from sm_train.entrypoints.training.training_loss import TrainingLoss


def main() -> None:
    rank, first, last = map(int, os.environ["DIVERGE"].split(":"))
    finite_loss = TrainingLoss.mean
    passes = 0

    def loss(self: TrainingLoss, prediction: Any, target: Any) -> Any:
        nonlocal passes
        passes += 1
        value: Any = finite_loss(self, prediction, target)
        if int(os.environ["RANK"]) != rank or not first <= passes <= last:
            return value
        if passes == last and os.environ.get("LOSE_FOLDER"):
            shutil.rmtree(SageMakerPaths.from_environment().checkpoints, ignore_errors=True)
        return value * float("nan")

    TrainingLoss.mean = loss  # type: ignore[method-assign]
    train.main()


if __name__ == "__main__":
    main()
