"""The built-in training, in which the loss of one micro-batch in every N is NaN."""

from __future__ import annotations

import os
import sys
from typing import Any


def main() -> None:
    from sm_train.entrypoints.training import train, training_loss

    remainder, every = map(int, os.environ["NONFINITE_STEPS"].split("/"))
    mean, calls = training_loss.TrainingLoss.mean, 0

    def with_nan(self: Any, prediction: Any, target: Any) -> Any:
        nonlocal calls
        calls += 1
        loss = mean(self, prediction, target)
        return loss * float("nan") if calls % every in range(remainder + 1) else loss

    training_loss.TrainingLoss.mean = with_nan  # type: ignore[method-assign]
    train.main(sys.argv[1:])


if __name__ == "__main__":
    main()
