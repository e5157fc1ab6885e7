"""Measure every shipped preset and write its plan next to it (``make plans``)."""

from __future__ import annotations

from sm_train.entrypoints.models.components import preset_names
from sm_train.entrypoints.planning.measure import write_plan


def main() -> None:
    """Write the plans, one after the other."""
    for name in preset_names():
        print(f"{name}: wrote {write_plan(name)}", flush=True)


if __name__ == "__main__":
    main()
