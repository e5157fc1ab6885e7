"""Random numbers of a sample belong to it and to the epoch, wherever and with whom it is drawn."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sm_train.entrypoints.common.rng import hash64, random_below
from sm_train.entrypoints.common.sample_rng import CAPTION, LATENT, NOISE, TIMESTEP, SampleRng

ORIGINS = st.lists(
    st.tuples(st.integers(0, 2**20), st.integers(0, 2**31)), min_size=1, max_size=8, unique=True
)


def noise(origin: tuple[int, int], seed: int = 0, epoch: int = 0) -> torch.Tensor:
    draws = SampleRng(seed, kinds=2, channels=3, scale=8)
    out = torch.empty(draws.shape(1, 32, 48))[:, 0]
    draws.fill_normal(out, epoch, *origin)
    return out


@settings(deadline=None)
@given(ORIGINS, st.integers(0, 2**31 - 1), st.integers(0, 10**6))
def test_a_samples_numbers_do_not_depend_on_its_batch(
    origins: list[tuple[int, int]], seed: int, epoch: int
) -> None:
    together = SampleRng(seed).uniform(TIMESTEP, epoch, origins)
    for place, origin in enumerate(origins):
        assert SampleRng(seed).uniform(TIMESTEP, epoch, [origin])[0] == together[place]
        assert torch.equal(noise(origin, seed, epoch), noise(origin, seed, epoch))


def test_seed_epoch_sample_and_purpose_all_matter() -> None:
    keys = [(0, 0, (1, 2)), (1, 0, (1, 2)), (0, 1, (1, 2)), (0, 0, (2, 1)), (0, 0, (1, 3))]
    values = [float(SampleRng(seed).uniform(NOISE, epoch, [one])[0]) for seed, epoch, one in keys]
    values += [
        float(SampleRng(0).uniform(of, 0, [(1, 2)])[0]) for of in (TIMESTEP, CAPTION, LATENT)
    ]
    assert len(set(values)) == len(values)
    firsts = [float(noise(one, seed, epoch)[0, 0, 0, 0]) for seed, epoch, one in keys]
    firsts += [float(noise((1, 2))[LATENT, 0, 0, 0])]
    assert len(set(firsts)) == len(firsts)


def test_noise_is_as_large_as_what_the_network_sees() -> None:
    assert SampleRng(0, kinds=2, channels=4, scale=8).shape(5, 512, 768) == (2, 5, 4, 64, 96)
    assert SampleRng(0).shape(5, 512, 512)[0] == 0


def test_numbers_are_spread_evenly_and_normally() -> None:
    origins = [(shard, sample) for shard in range(10) for sample in range(1000)]
    uniform = np.sort(SampleRng(0).uniform(TIMESTEP, 0, origins))
    assert uniform[0] > 0
    assert uniform[-1] < 1
    # Kolmogorov and Smirnov: 1.63 / √n is exceeded by chance once in a hundred.
    assert np.abs(uniform - (np.arange(10_000) + 0.5) / 10_000).max() < 1.63 / 100
    many = torch.stack([noise(origin)[NOISE, 0, 0] for origin in origins])
    assert abs(float(many.mean())) < 0.02
    assert abs(float(many.std()) - 1) < 0.02
    across = np.corrcoef(many.numpy().T)
    assert np.abs(across - np.eye(many.shape[1])).max() < 0.05


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=6))
def test_arrays_are_mixed_as_numbers_are(key: list[int]) -> None:
    arrays = [np.array([part], dtype=np.uint64) for part in key]
    assert int(hash64(*arrays)[0]) == int(hash64(*key))
    assert 0 <= random_below(7, *key) < 7
