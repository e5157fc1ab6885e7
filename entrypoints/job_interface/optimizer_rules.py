"""Where the shipped optimizers can run and what their state takes, for plans and the trainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from sm_train.entrypoints.job_interface.job_config import major_minor

OPTIMIZERS = ("adamw", "adamw8bit", "adafactor", "muon")
SCHEDULES = ("constant", "cosine", "linear", "wsd")

_MIN_PYTORCH = {
    # bitsandbytes 0.50.2 requires PyTorch 2.4 (its metadata, 2026-10).
    "adamw8bit": (2, 4),
    # Release notes of PyTorch 2.5 and 2.9.
    "adafactor": (2, 5),
    "muon": (2, 9),
}

NEEDS_WHOLE_WEIGHTS = {
    "Adafactor": "factors the second moment over all rows of a weight, and FSDP2 shards rows; "
    "write sharding: none, or name: adamw",
    "Muon": "orthogonalizes whole matrices, and FSDP2 shards their rows; write sharding: none, or "
    "name: adamw",
}
"""Why an optimizer class cannot train sharded weights, with the fix."""


def problem(name: str, pytorch: str | None, *, sharded: bool) -> str | None:
    """Return why the optimizer ``name`` cannot run, with the fix; None if it can.

    ``pytorch`` is the version of PyTorch in the job, None if unknown.
    """
    oldest = _MIN_PYTORCH.get(name)
    if oldest is not None and pytorch is not None and major_minor(pytorch) < oldest:
        needed = ".".join(map(str, oldest))
        return f"needs PyTorch {needed}, and the job has {pytorch}; write name: adamw"
    if not sharded:
        return None
    # Also as torch.optim:Adafactor.
    class_name = {"adafactor": "Adafactor", "muon": "Muon"}.get(name, name.rpartition(":")[2])
    return NEEDS_WHOLE_WEIGHTS.get(class_name)


def is_hidden_matrix(name: str, shape: Sequence[int]) -> bool:
    """Return whether the weight ``name`` is the matrix of a block's linear layer; blocks are items
    of module lists.

    Embeddings and the first and last layer are not: they map from and to other spaces. A block's
    other weights with two dimensions are tables of vectors, such as PixArt's ``scale_shift_table``,
    and have other names than ``weight``.
    """
    *modules, kind = name.split(".")
    return len(shape) == 2 and kind == "weight" and any(module.isdigit() for module in modules)


def state_bytes(optimizer: str, weights: Mapping[str, Sequence[int]]) -> int:
    """Return the bytes of an optimizer's state, by the shape of each of the ``weights``.

    A user's function counts as AdamW: what it keeps is unknown.
    """
    size = _STATE_BYTES.get(optimizer, _adamw_bytes)
    return sum(size(name, shape) for name, shape in weights.items())


def _adamw_bytes(name: str, shape: Sequence[int]) -> int:
    return 8 * prod(shape)


def _adamw8bit_bytes(name: str, shape: Sequence[int]) -> int:
    """Two moments of one byte, with a scale for each block of 256 numbers.

    bitsandbytes keeps fp32 moments of weights with fewer than 4,096 numbers (optimizer.py, 0.50.2).
    """
    count = prod(shape)
    return 8 * count if count < 4096 else 2 * (count + 4 * -(-count // 256))


def _adafactor_bytes(name: str, shape: Sequence[int]) -> int:
    """The second moment, factored over the last two dimensions (torch/optim/_adafactor.py)."""
    if len(shape) < 2:
        return 4 * prod(shape)
    return 4 * prod(shape[:-2]) * (shape[-2] + shape[-1])


def _muon_bytes(name: str, shape: Sequence[int]) -> int:
    return 4 * prod(shape) if is_hidden_matrix(name, shape) else _adamw_bytes(name, shape)


_STATE_BYTES = {
    "adamw": _adamw_bytes,
    "adamw8bit": _adamw8bit_bytes,
    "adafactor": _adafactor_bytes,
    "muon": _muon_bytes,
}
