"""A sample's random numbers depend on seed, epoch, sample and purpose, and on nothing else."""

from __future__ import annotations

from random import Random

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sm_train.entrypoints.base.rng import hash64, random_below
from sm_train.entrypoints.sample_metadata.sample_rng import Purpose, SampleRng

SAMPLES = st.lists(
    st.tuples(st.integers(0, 2**20), st.integers(0, 2**31)), min_size=1, max_size=8, unique=True
)


def noise(sample: tuple[int, int], seed: int = 0, epoch: int = 0) -> torch.Tensor:
    """Return one sample's noise (2, 3, 4, 6)."""
    rng = SampleRng(seed, num_noises=2, channels=3, scale=8)
    result = torch.empty(rng.shape(1, 32, 48))[:, 0]
    rng.fill_normal(result, epoch, *sample)
    return result


@settings(deadline=None)
@given(SAMPLES, st.randoms(), st.integers(0, 2**31 - 1), st.integers(0, 10**6))
def test_numbers_do_not_depend_on_the_batch(
    samples: list[tuple[int, int]], random: Random, seed: int, epoch: int
) -> None:
    """Noise written into rows of a batch, in any order, equals that of each sample alone."""
    rng = SampleRng(seed, num_noises=2, channels=3, scale=8)
    together = rng.uniform(Purpose.TIMESTEP, epoch, samples)
    batch = torch.full(rng.shape(len(samples), 32, 48), torch.nan)
    rows = list(range(len(samples)))
    random.shuffle(rows)
    for row in rows:
        rng.fill_normal(batch[:, row], epoch, *samples[row])
    for row, sample in enumerate(samples):
        assert rng.uniform(Purpose.TIMESTEP, epoch, [sample])[0] == together[row]
        assert torch.equal(noise(sample, seed, epoch), batch[:, row])


def test_numbers_are_the_same_in_every_version() -> None:
    """A resumed run must continue with the numbers that the first attempt would have used."""
    [timestep] = SampleRng(0).uniform(Purpose.TIMESTEP, 0, [(1, 2)])
    assert timestep == 0.27360049183377144
    assert hash64(1, 2, 3) == 0xD0734750FDE362B3
    expected = torch.randn(
        3, 4, 6, generator=torch.Generator().manual_seed(int(hash64(5, 7, 1, 1, 2)) - 2**63)
    )
    assert torch.equal(noise((1, 2), seed=5, epoch=7)[Purpose.LATENT], expected)


def test_seed_epoch_sample_and_purpose_all_matter() -> None:
    keys = [(0, 0, (1, 2)), (1, 0, (1, 2)), (0, 1, (1, 2)), (0, 0, (2, 1)), (0, 0, (1, 3))]
    values = [
        float(SampleRng(seed).uniform(Purpose.NOISE, epoch, [sample])[0])
        for seed, epoch, sample in keys
    ]
    values += [
        float(SampleRng(0).uniform(purpose, 0, [(1, 2)])[0])
        for purpose in (Purpose.TIMESTEP, Purpose.CAPTION_DROPOUT, Purpose.LATENT)
    ]
    assert len(set(values)) == len(values)
    first_elements = [float(noise(sample, seed, epoch)[0, 0, 0, 0]) for seed, epoch, sample in keys]
    first_elements += [float(noise((1, 2))[Purpose.LATENT, 0, 0, 0])]
    assert len(set(first_elements)) == len(first_elements)


def test_noise_has_the_shape_of_the_networks_input() -> None:
    rng = SampleRng(0, num_noises=2, channels=4, scale=8)
    assert rng.shape(5, 512, 768) == (2, 5, 4, 64, 96)
    assert SampleRng(0).shape(5, 512, 512)[0] == 0


def test_numbers_are_uniform_and_normal() -> None:
    samples = [(shard, index) for shard in range(10) for index in range(1000)]
    uniform = np.sort(SampleRng(0).uniform(Purpose.TIMESTEP, 0, samples))
    assert uniform[0] > 0
    assert uniform[-1] < 1
    # Kolmogorov-Smirnov: chance exceeds 1.63 / √n once in a hundred times.
    assert np.abs(uniform - (np.arange(10_000) + 0.5) / 10_000).max() < 1.63 / 100
    normal = torch.stack([noise(sample)[Purpose.NOISE, 0, 0] for sample in samples])
    assert abs(float(normal.mean())) < 0.02
    assert abs(float(normal.std()) - 1) < 0.02
    correlation = np.corrcoef(normal.numpy().T)
    assert np.abs(correlation - np.eye(normal.shape[1])).max() < 0.05


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=6))
def test_hash64_of_arrays_equals_that_of_integers(key: list[int]) -> None:
    arrays = [np.array([part], dtype=np.uint64) for part in key]
    assert int(hash64(*arrays)[0]) == int(hash64(*key))
    assert 0 <= random_below(7, *key) < 7
