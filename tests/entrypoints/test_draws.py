"""Random numbers of a sample belong to it and to the step, wherever and with whom it is drawn."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sm_train.entrypoints.draws import CAPTION, LATENT, NOISE, TIMESTEP, Draws
from sm_train.entrypoints.order import draw, mix

ORIGINS = st.lists(
    st.tuples(st.integers(0, 2**20), st.integers(0, 2**31)), min_size=1, max_size=8, unique=True
)


def draws(origins: list[tuple[int, int]], seed: int = 0, step: int = 0) -> Draws:
    return Draws(seed, step, origins, torch.Generator())


@settings(deadline=None)
@given(ORIGINS, st.integers(0, 2**31 - 1), st.integers(0, 10**6), st.randoms())
def test_a_samples_numbers_do_not_depend_on_its_batch(
    origins: list[tuple[int, int]], seed: int, step: int, order: object
) -> None:
    together = draws(origins, seed, step)
    uniform, noise = together.uniform(TIMESTEP), together.normal(NOISE, (3, 4, 4))
    for place, origin in enumerate(origins):
        alone = draws([origin], seed, step)
        assert alone.uniform(TIMESTEP)[0] == uniform[place]
        assert torch.equal(alone.normal(NOISE, (3, 4, 4))[0], noise[place])


def test_seed_step_sample_and_purpose_all_matter() -> None:
    base = draws([(1, 2)]).uniform(NOISE)
    others = [
        draws([(1, 2)], seed=1), draws([(1, 2)], step=1), draws([(2, 1)]), draws([(1, 3)])
    ]  # fmt: skip
    values = [float(base[0]), *(float(one.uniform(NOISE)[0]) for one in others)]
    values += [
        float(draws([(1, 2)]).uniform(purpose)[0]) for purpose in (TIMESTEP, CAPTION, LATENT)
    ]
    assert len(set(values)) == len(values)


def test_numbers_are_spread_evenly_and_normally() -> None:
    origins = [(shard, sample) for shard in range(10) for sample in range(1000)]
    many = draws(origins)
    uniform = np.sort(many.uniform(TIMESTEP))
    assert uniform[0] > 0
    assert uniform[-1] < 1
    # Kolmogorov and Smirnov: 1.63 / √n is exceeded by chance once in a hundred.
    assert np.abs(uniform - (np.arange(10_000) + 0.5) / 10_000).max() < 1.63 / 100
    noise = many.normal(NOISE, (16,))
    assert abs(float(noise.mean())) < 0.01
    assert abs(float(noise.std()) - 1) < 0.01
    across = np.corrcoef(noise.numpy().T)
    assert np.abs(across - np.eye(16)).max() < 0.05


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=6))
def test_arrays_are_mixed_as_numbers_are(key: list[int]) -> None:
    arrays = [np.array([part], dtype=np.uint64) for part in key]
    assert int(mix(*arrays)[0]) == int(mix(*key))
    assert 0 <= draw(7, *key) < 7
