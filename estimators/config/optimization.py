"""The run file's ``training.optimizer`` and ``training.lr_schedule``."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator
from sm_train.entrypoints.job_interface.job_config import LrScheduleConfig, OptimizerConfig
from sm_train.entrypoints.job_interface.optimizer_rules import OPTIMIZERS, SCHEDULES
from sm_train.estimators.config.fields import (
    Fraction,
    FunctionName,
    NonNegativeFloat,
    PositiveFloat,
    Section,
    reject_bool,
)

Option = bool | int | float | str | list[bool | int | float | str] | None
"""A value that the job gets as it is written in the run file."""

_APPLIES = {
    "adamw": {"betas", "eps", "weight_decay"},
    "adamw8bit": {"betas", "eps", "weight_decay"},
    "adafactor": {"weight_decay"},
    # Muon's own arguments, and those of AdamW for the weights that are no matrices.
    "muon": {"betas", "eps", "weight_decay", "momentum"},
}
_ClosedFraction = Annotated[float, BeforeValidator(reject_bool), Field(ge=0, le=1)]


def _from_name(value: Any) -> Any:
    """Read ``cosine`` as ``{name: cosine}``."""
    return {"name": value} if isinstance(value, str) else value


def _named(value: str, known: tuple[str, ...]) -> str | None:
    """Return why ``value`` is neither a known name nor a function; None if it is."""
    if value in known or ":" in value:
        return None
    return f"{value!r} is not one of {', '.join(known)}, nor module:function"


class OptimizerSection(Section):
    """The optimizer, or only its name."""

    name: FunctionName = Field(
        default="adamw",
        description="adamw; adamw8bit (moments in 8 bits); adafactor (factored second moment); "
        "muon (for matrices, AdamW for other weights); or module:function of `code`, which gets "
        "the weights and lr and returns a torch.optim.Optimizer.",
    )
    betas: tuple[Fraction, Fraction] | None = Field(
        default=None, description="Decay rates of AdamW's moments; default 0.9 and 0.999."
    )
    eps: PositiveFloat | None = Field(
        default=None, description="Term in AdamW's denominator; default 1.0e-8."
    )
    weight_decay: NonNegativeFloat | None = Field(
        default=None, description="Decoupled weight decay; default 0.01."
    )
    momentum: Fraction | None = Field(default=None, description="Momentum of Muon; default 0.95.")
    options: dict[str, Option] = Field(
        default_factory=dict, description="Further arguments of module:function."
    )

    @model_validator(mode="after")
    def _check_arguments(self) -> OptimizerSection:
        if reason := _named(self.name, OPTIMIZERS):
            raise ValueError(f"name: {reason}")
        applies = _APPLIES.get(self.name)
        if applies is None:
            return self
        for key in ("betas", "eps", "momentum", "weight_decay"):
            if getattr(self, key) is not None and key not in applies:
                raise ValueError(f"{key}: does not apply to {self.name}; remove it")
        if self.options:
            raise ValueError("options: are arguments of a module:function; remove them")
        return self

    def job_config(self) -> OptimizerConfig:
        return self._job_struct(OptimizerConfig)


class LrScheduleSection(Section):
    """The learning rate's schedule after the warm-up, or only its name."""

    name: FunctionName = Field(
        default="constant",
        description="constant; cosine or linear (to final_factor at the stage's end); wsd (stable, "
        "then a linear decay); or module:function of `code`, which gets the step and the stage's "
        "number of steps and returns a factor on learning_rate.",
    )
    final_factor: _ClosedFraction | None = Field(
        default=None,
        description="Factor on learning_rate at the end of the stage; default 0.",
    )
    decay_fraction: Annotated[_ClosedFraction, Field(gt=0)] | None = Field(
        default=None, description="Fraction of a stage's steps in which wsd decays; default 0.1."
    )
    options: dict[str, Option] = Field(
        default_factory=dict, description="Further arguments of module:function."
    )

    @model_validator(mode="after")
    def _check_arguments(self) -> LrScheduleSection:
        if reason := _named(self.name, SCHEDULES):
            raise ValueError(f"name: {reason}")
        if self.final_factor is not None and self.name not in ("cosine", "linear", "wsd"):
            raise ValueError(f"final_factor: does not apply to {self.name}; remove it")
        if self.decay_fraction is not None and self.name != "wsd":
            raise ValueError(f"decay_fraction: does not apply to {self.name}; remove it")
        if self.options and self.name in SCHEDULES:
            raise ValueError("options: are arguments of a module:function; remove them")
        return self

    def job_config(self) -> LrScheduleConfig:
        return self._job_struct(LrScheduleConfig)


OptimizerField = Annotated[
    OptimizerSection, BeforeValidator(_from_name, json_schema_input_type=OptimizerSection | str)
]
LrScheduleField = Annotated[
    LrScheduleSection, BeforeValidator(_from_name, json_schema_input_type=LrScheduleSection | str)
]
