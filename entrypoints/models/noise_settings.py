"""Read what a pretrained network learned from its scheduler's configuration.

The run file may repeat these settings, not change them: a network trained for another target or
another noise schedule would have to unlearn it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sm_train.entrypoints.job_interface.job_config import ModelConfig

SCHEDULER_CONFIG = "scheduler/scheduler_config.json"

_FLOW_SCHEDULERS = frozenset(
    {"FlowMatchEulerDiscreteScheduler", "FlowMatchHeunDiscreteScheduler", "FlowMatchLCMScheduler"}
)
_DIFFUSION_SCHEDULERS = frozenset(
    {
        "DDIMParallelScheduler",
        "DDIMScheduler",
        "DDPMParallelScheduler",
        "DDPMScheduler",
        "DEISMultistepScheduler",
        "DPMSolverMultistepScheduler",
        "DPMSolverSDEScheduler",
        "DPMSolverSinglestepScheduler",
        "EulerAncestralDiscreteScheduler",
        "EulerDiscreteScheduler",
        "HeunDiscreteScheduler",
        "KDPM2AncestralDiscreteScheduler",
        "KDPM2DiscreteScheduler",
        "LCMScheduler",
        "LMSDiscreteScheduler",
        "PNDMScheduler",
        "SASolverScheduler",
        "TCDScheduler",
        "UniPCMultistepScheduler",
    }
)
"""Diffusers' schedulers (0.42) that sample from networks trained on DDPM's discrete noise levels.
Others have noise levels of their own, such as EDM's."""

_BETA_SCHEDULES = ("linear", "scaled_linear", "squaredcos_cap_v2")
"""Those of DDIM, the scheduler of final models."""

_SCHEDULER_DEFAULTS = {"beta_schedule": "linear", "beta_start": 0.0001, "beta_end": 0.02}
"""Diffusers' values of keys that a scheduler's configuration lacks."""


@dataclass(frozen=True)
class NoiseSettings:
    """What the network learns: from the run file, the pretrained scheduler or the preset.

    ``schedule`` holds the arguments of diffusers' scheduler, empty for a flow. ``shift`` is None
    for the default of the resolution.
    """

    prediction_type: str
    schedule: Mapping[str, Any]
    zero_terminal_snr: bool
    shift: float | None


class ContradictionError(ValueError):
    """The run file contradicts the pretrained model; the message is one line with the fix."""


def noise_settings(
    preset: Mapping[str, Any], model: ModelConfig, scheduler: Mapping[str, Any] | None
) -> NoiseSettings:
    """Return what to train; ``scheduler`` is the configuration of a pretrained network's.

    Raises:
        ContradictionError: the run file or the preset contradicts the scheduler.
    """
    if scheduler is None:
        return NoiseSettings(
            model.prediction_type or preset["prediction_type"],
            preset.get("diffusion", {}),
            bool(model.zero_terminal_snr),
            model.timestep_shift,
        )
    prediction_type = _prediction_type(scheduler)
    _require_equal("prediction_type", model.prediction_type, prediction_type)
    _require_supported(preset, prediction_type)
    if prediction_type == "flow":
        return _flow_settings(model, scheduler)
    zero_snr = scheduler.get("rescale_betas_zero_snr")
    _require_equal("zero_terminal_snr", model.zero_terminal_snr, zero_snr)
    zero_terminal_snr = bool(model.zero_terminal_snr or zero_snr)
    if zero_terminal_snr and prediction_type == "epsilon":
        raise ContradictionError(
            "model.zero_terminal_snr: needs v_prediction, and the pretrained model predicts "
            "epsilon; remove it or use other components"
        )
    if zero_terminal_snr and model.min_snr_gamma is not None:
        raise ContradictionError(
            "model.min_snr_gamma: the pretrained model has zero terminal SNR, whose last timestep "
            "would get the weight 0; remove min_snr_gamma"
        )
    known = {key: scheduler[key] for key in _SCHEDULE_KEYS if scheduler.get(key) is not None}
    for key, value in known.items():
        _require_valid(key, value)
    schedule = {**preset["diffusion"], **_SCHEDULER_DEFAULTS, **known}
    return NoiseSettings(prediction_type, schedule, zero_terminal_snr, None)


def _prediction_type(scheduler: Mapping[str, Any]) -> str:
    """Return what the network predicts.

    Raises:
        ContradictionError: the scheduler is of a kind that training has no objective for.
    """
    name = scheduler.get("_class_name", "DDPMScheduler")
    if name in _FLOW_SCHEDULERS:
        return "flow"
    if name not in _DIFFUSION_SCHEDULERS:
        raise _unsupported("_class_name", name)
    if scheduler.get("timestep_type") == "continuous":
        raise _unsupported("timestep_type", "continuous")
    return str(scheduler.get("prediction_type", "epsilon"))


def relearned(scheduler: Mapping[str, Any], prediction_type: str) -> dict[str, Any] | None:
    """Return the configuration of a pretrained scheduler for another prediction type.

    None between diffusion and flow, which have no noise levels in common: take the preset's.
    """
    is_flow = scheduler.get("_class_name") in _FLOW_SCHEDULERS
    if is_flow or prediction_type == "flow":
        return dict(scheduler) if is_flow and prediction_type == "flow" else None
    return {**scheduler, "prediction_type": prediction_type}


def _unsupported(key: str, value: object) -> ContradictionError:
    return ContradictionError(
        f"{SCHEDULER_CONFIG}: {key} {str(value)[:60]} is not supported: the network learned other "
        "noise levels than those that the trainer draws; use other components"
    )


def _require_supported(preset: Mapping[str, Any], prediction_type: str) -> None:
    diffusion = ("v_prediction", "epsilon") if "diffusion" in preset else ()
    supported = {preset["prediction_type"], *diffusion}
    if prediction_type not in supported:
        raise ContradictionError(
            f"model.preset: the pretrained model predicts {prediction_type}, and the preset "
            f"supports {' or '.join(sorted(supported))}; use another preset or other components"
        )


def _require_equal(key: str, wanted: object, stored: object) -> None:
    """Refuse a run file's value that differs from the scheduler's; None is not stated."""
    if wanted is not None and stored is not None and wanted != stored:
        raise ContradictionError(
            f"model.{key}: the run file says {_yaml(wanted)}, and the pretrained model's "
            f"{SCHEDULER_CONFIG} {_yaml(stored)}; remove it from the run file, or use other "
            "components"
        )


def _yaml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _flow_settings(model: ModelConfig, scheduler: Mapping[str, Any]) -> NoiseSettings:
    if scheduler.get("use_dynamic_shifting"):
        raise ContradictionError(
            "model.components: the pretrained scheduler uses use_dynamic_shifting, which is not "
            "supported; use other components"
        )
    shift = scheduler.get("shift", 1.0)
    if not _is_number(shift) or shift <= 0:
        raise _damaged("shift", shift)
    _require_equal("timestep_shift", model.timestep_shift, float(shift))
    return NoiseSettings("flow", {}, False, float(shift))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_beta(value: Any) -> bool:
    return _is_number(value) and 0 < value < 1


def _is_list_of_betas(value: object) -> bool:
    is_list = isinstance(value, Sequence) and not isinstance(value, str) and len(value) > 0
    return is_list and all(map(_is_beta, value))  # type: ignore[call-overload]


_SCHEDULE_KEYS: Mapping[str, Callable[[Any], bool]] = {
    "num_train_timesteps": lambda value: type(value) is int and value > 0,
    "beta_schedule": lambda value: value in _BETA_SCHEDULES,
    "beta_start": _is_beta,
    "beta_end": _is_beta,
    "trained_betas": _is_list_of_betas,
    "clip_sample": lambda value: isinstance(value, bool),
}
"""Keys of a scheduler's configuration that define the noise levels, and what they may be."""


def _require_valid(key: str, value: object) -> None:
    if not _SCHEDULE_KEYS[key](value):
        raise _damaged(key, value)


def _damaged(key: str, value: object) -> ContradictionError:
    return ContradictionError(
        f"{SCHEDULER_CONFIG}: {key} {str(value)[:60]} is not supported; use other components"
    )
