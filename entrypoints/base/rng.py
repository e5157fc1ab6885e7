"""Pseudorandom orders and numbers as pure functions of a key, the same on every platform.

Only the raw 64-bit stream of PCG64 is used: NumPy guarantees that it never changes (NEP 19), but
gives no such guarantee for ``Generator.permutation``. A run that resumes with another version of
NumPy continues in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
UInt64s = NDArray[np.uint64]

_MASK = 2**64 - 1


def seeded_permutation(length: int, *key: int) -> Ints:
    """Return a permutation of 0 … ``length`` - 1 that depends only on ``key``, int64 (length,)."""
    keys = np.random.PCG64(np.random.SeedSequence(key)).random_raw(length)
    return np.argsort(keys, kind="stable")


def random_below(below: int, *key: int) -> int:
    """Return a number from 0 to ``below`` - 1 that depends only on ``key``."""
    # The high half of a 128-bit product scales 64 random bits to the range without a division.
    return (int(hash64(*key)) * below) >> 64


def hash64(*key: int | UInt64s) -> Any:
    """Return 64 random bits for ``key``; if a part is an array, one number per element.

    Chained SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014);
    about twenty times faster than seeding a generator for each sample.
    """
    state: Any = 0
    for part in key:
        state = state ^ part
        # Python integers grow without limit; uint64 arrays wrap around automatically.
        state = (
            _splitmix64(state & _MASK, _wrap)
            if isinstance(state, int)
            else _splitmix64(state, _unchanged)
        )
    return state


def _splitmix64(state: Any, wrap: Callable[[Any], Any]) -> Any:
    """Apply one step of SplitMix64; ``wrap`` reduces intermediate results to 64 bits."""
    state = wrap(state + 0x9E3779B97F4A7C15)
    state = wrap((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9)
    state = wrap((state ^ (state >> 27)) * 0x94D049BB133111EB)
    return state ^ (state >> 31)


def _wrap(state: int) -> int:
    return state & _MASK


def _unchanged(state: UInt64s) -> UInt64s:
    return state
