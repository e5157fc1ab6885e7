"""The program that a stage runs: what decides the time of an image besides resolution and cluster.

A speed belongs to one program; for another one it is converted by the speed model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from sm_train.cost.speed_model import TextEncoderPlacement


@dataclass(frozen=True)
class StageProgram:
    """The settings of a program that the speed model converts; None is unknown.

    ``sharding`` is "none" on one GPU. Frozen encoders do not run if the job reads latents.
    """

    precision: str | None = None
    reduce_dtype: str | None = None
    compiled: bool | None = None
    sharding: str | None = None
    activation_checkpointing: bool | Literal["selective"] | None = None
    holds_latents: bool | None = None
    text_encoders: TextEncoderPlacement | None = None

    def __post_init__(self) -> None:
        if self.holds_latents:
            object.__setattr__(self, "text_encoders", None)

    def agrees_with(self, other: StageProgram) -> bool:
        """Return whether all settings are equal that are known of both."""
        mine, theirs = self.known(), other.known()
        return all(mine[name] == theirs[name] for name in mine.keys() & theirs.keys())

    def known(self) -> dict[str, Any]:
        """Return the known settings by their names."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}


UNKNOWN_PROGRAM = StageProgram()

PRECOMPUTED_LATENTS = "precomputed latents"
"""``input_kind`` of a start event whose job reads latents from the shards."""


def program_that_ran(start: Mapping[str, Any]) -> StageProgram:
    """Return the program of a job by its ``start`` event; nothing is known of a user's script."""
    if start.get("entry") is not None:
        return UNKNOWN_PROGRAM
    kind = start.get("input_kind")
    return StageProgram(
        precision=start.get("precision"),
        reduce_dtype=start.get("reduce_dtype"),
        compiled=start.get("compile"),
        sharding=start.get("sharding"),
        activation_checkpointing=start.get("activation_checkpointing"),
        holds_latents=None if kind is None else kind == PRECOMPUTED_LATENTS,
        text_encoders=start.get("text_encoders"),
    )
