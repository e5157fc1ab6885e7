"""What layers cost on one image: multiply-adds, weights, and what autograd keeps of them.

Without PyTorch, so that a laptop can plan with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass


class UnplannedModelError(ValueError):
    """A configuration has parts that are not counted."""


@dataclass(frozen=True)
class Layer:
    """One layer's work on one image: multiply-adds of the forward pass, parameters, and elements
    that autograd keeps for the backward pass (of matrix products and of norms apart: under bf16
    autocast the first are 2 bytes each, the second 4)."""

    multiply_adds: int = 0
    parameters: int = 0
    kept: int = 0
    kept_by_norms: int = 0

    def __add__(self, other: Layer) -> Layer:
        return Layer(
            self.multiply_adds + other.multiply_adds,
            self.parameters + other.parameters,
            self.kept + other.kept,
            self.kept_by_norms + other.kept_by_norms,
        )

    def kept_bytes(self, precision: str) -> int:
        """In bf16 or fp32."""
        return (2 if precision == "bf16" else 4) * self.kept + 4 * self.kept_by_norms


@dataclass(frozen=True)
class Block:
    """Layers that activation checkpointing computes again together, from ``entering`` elements.

    None: it leaves them alone.
    """

    total: Layer
    entering: int | None = None

    @classmethod
    def of(cls, layers: Iterable[Layer], entering: int | None = None) -> Block:
        return cls(sum(layers, Layer()), entering)


@dataclass(frozen=True)
class NetworkPlan:
    """A network's blocks, for one image."""

    blocks: tuple[Block, ...]

    @property
    def total(self) -> Layer:
        return sum((block.total for block in self.blocks), Layer())

    @property
    def training_flops(self) -> int:
        """FLOP of forward and backward pass: 2 for a multiply-add, and the backward pass is twice
        the forward pass (a product for the gradient of each of its two factors)."""
        return 6 * self.total.multiply_adds

    @property
    def largest_block_parameters(self) -> int:
        """Of what FSDP2 gathers at once, about: one block that is computed again together."""
        return max(block.total.parameters for block in self.blocks)

    def activation_bytes(self, precision: str, *, checkpointing: bool) -> int:
        """Bytes that autograd keeps for one image between the passes, in bf16 or fp32.

        With ``checkpointing`` of each block only what enters it, and one block's at a time.
        """
        if not checkpointing:
            return self.total.kept_bytes(precision)
        again = [block for block in self.blocks if block.entering is not None]
        kept = sum(
            block.total.kept_bytes(precision) for block in self.blocks if block.entering is None
        )
        entering = sum(Layer(kept=block.entering or 0).kept_bytes(precision) for block in again)
        largest = max((block.total.kept_bytes(precision) for block in again), default=0)
        return kept + entering + largest


def linear(tokens: int, width: int, out: int, *, bias: bool = True) -> Iterator[Layer]:
    """Keeps its input."""
    yield Layer(tokens * width * out, width * out + bias * out, tokens * width)


def shared_linear(tokens: int, width: int, out: int, *, bias: bool = True) -> Iterator[Layer]:
    """Another projection of an input that is kept already."""
    yield Layer(tokens * width * out, width * out + bias * out)


def norm(width: int, tokens: int, *, activation: bool = False) -> Layer:
    """A norm keeps its input; an activation behind it keeps the norm's output."""
    return Layer(0, 2 * width, width * tokens if activation else 0, width * tokens)


def attention_core(tokens: int, others: int, width: int) -> Layer:
    """Scores and their product with the values, of a fused kernel: it keeps queries, keys, values
    and not the scores."""
    return Layer(2 * tokens * others * width, 0, tokens * width + 2 * others * width)
