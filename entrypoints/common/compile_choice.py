"""Whether the layers of a network are compiled: decided alike in the job and in its estimate."""

from __future__ import annotations

from dataclasses import dataclass

from sm_train.entrypoints.common.job_config import Compile

MEASURED_SINCE = (2, 11)
"""The PyTorch with which compiled training was measured on a GPU: 1.1 to 1.4 × as fast on an H200
(benchmarks/gpu.py, 2026-11)."""


@dataclass(frozen=True)
class CompileChoice:
    """Whether layers are compiled, and why."""

    compiled: bool
    reason: str


def choose_compile(
    setting: Compile, *, gpu: bool, pytorch: str | None, shapes_vary: bool, adapter: bool
) -> CompileChoice:
    """Return the choice for ``training.compile``.

    ``auto`` compiles what was measured: a whole network on a GPU, in batches of one shape.
    ``pytorch`` is the version, such as 2.13.0+cu130; None is unknown.
    """
    if setting != "auto":
        return CompileChoice(bool(setting), "training.compile")
    reasons = {
        "no GPU": not gpu,
        "the image's PyTorch is unknown": pytorch is None,
        "not measured with this PyTorch": pytorch is not None and not _is_measured(pytorch),
        "data.aspect_buckets: each shape would be compiled": shapes_vary,
        "model.lora: not measured with adapters": adapter,
    }
    against = next((reason for reason, applies in reasons.items() if applies), None)
    return CompileChoice(against is None, f"auto: {against or 'a GPU, and batches of one shape'}")


def _is_measured(pytorch: str) -> bool:
    major, minor = pytorch.split(".")[:2]
    return (int(major), int(minor)) >= MEASURED_SINCE
