"""Builds a rank's batches from raw samples, decoded by any number of threads.

A bad sample is replaced by another one of its shuffle block. The choice is a pure function of the
sample's index, so every batch is full, and equal in every run.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from sm_train.entrypoints.common.captions import choose_caption
from sm_train.entrypoints.common.job_config import DataConfig
from sm_train.entrypoints.common.sample_rng import Purpose, SampleRng
from sm_train.entrypoints.data.buffer_pool import BufferLayout, BufferPool, layout_bytes
from sm_train.entrypoints.data.decoder_pool import Decoders, InProcessDecoders
from sm_train.entrypoints.data.image_decoder import DecodeSpec, decode_with
from sm_train.entrypoints.data.image_header import DecodeError
from sm_train.entrypoints.data.precomputed_latents import (
    PrecomputedLatents,
    PrecomputedLatentsError,
)
from sm_train.entrypoints.data.prefetch import PrefetchBuffer
from sm_train.entrypoints.data.sampler import DataPosition, EpochPass, Sampler
from sm_train.entrypoints.data.shard_catalog import DataError
from sm_train.entrypoints.data.shard_reader import BadSample, SampleBytes, ShardReader, Submit
from sm_train.entrypoints.data.tar_reader import TarError, sample_members
from torch import Tensor

Tokenize = Callable[[Sequence[str]], Sequence[Tensor]]
"""Turns captions into token ids (B, L) for each text encoder; sent to the loader's process."""

_SLICE_SAMPLES = 4
"""Samples that a thread decodes in one task."""

EARLY_BATCHES = 4
"""Batches whose samples are read singly when a job starts, while the first block is read.

Reading a block of 256 MiB takes half a minute at 30 ms for each request of 128 KB.
"""

_MAX_REPLACEMENTS = 64
_EMPTY = torch.empty(0)


@dataclass(frozen=True)
class Batch:
    """A decoded batch of B samples.

    ``pixels`` is uint8 (B, H, W, 3) and ``position`` the run's position after this batch.

    If the shards carry latents for this resolution, ``moments`` (B, 2 × channels, h, w), ``text``
    (B, tokens, width) and for some models ``pooled`` (B, width) are set, float16, and ``pixels``
    is (B, 0). Otherwise ``tokens`` are the captions' token ids (B, L) for each tokenizer.

    ``num_repeated`` samples were read before in this epoch: they replace bad ones, or pad the
    batches of a rank that has fewer samples than others. ``origins`` are the shard and the sample
    number of each sample.

    ``sizes`` (B, 4), int32, are the height and width of each original image and the top and left of
    its crop (:meth:`DecodeSpec.sizes`).

    ``noise`` (kinds, B, C, h, w) is the model's. ``timestep_uniform`` and ``dropout_uniform``
    (B,), in (0, 1), choose the timesteps and the captions to drop:
    :mod:`sm_train.entrypoints.common.sample_rng`.
    """

    pixels: Tensor
    captions: list[str]
    position: DataPosition
    bad_samples: tuple[BadSample, ...]
    num_repeated: int
    origins: tuple[tuple[int, int], ...]
    timestep_uniform: NDArray[np.float64]
    dropout_uniform: NDArray[np.float64]
    noise: Tensor = _EMPTY
    sizes: Tensor = _EMPTY
    moments: Tensor | None = None
    text: Tensor | None = None
    pooled: Tensor | None = None
    tokens: tuple[NDArray[np.int64], ...] = ()

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that are set, in the order of :meth:`with_tensors`."""
        tensors = (self.pixels, self.noise, self.sizes, self.moments, self.text, self.pooled)
        return tuple(tensor for tensor in tensors if tensor is not None)

    def with_tensors(
        self, pixels: Tensor, noise: Tensor = _EMPTY, sizes: Tensor = _EMPTY, *latents: Tensor
    ) -> Batch:
        """Return the same batch with its tensors in other memory."""
        moments, text, pooled = (*latents, None, None, None)[:3]
        moved = replace(self, pixels=pixels, noise=noise, sizes=sizes)
        return replace(moved, moments=moments, text=text, pooled=pooled)

    def pin_memory(self) -> Batch:
        """Return the batch in pinned memory; called by the DataLoader."""
        return self.with_tensors(*(tensor.pin_memory() for tensor in self.tensors))


@dataclass(frozen=True)
class _BatchSlot:
    """Memory that a batch, or one of its samples, is decoded into."""

    decode_spec: DecodeSpec
    pixels: Tensor
    noise: Tensor
    sizes: Tensor
    latents: tuple[Tensor, ...]

    def sample(self, row: int) -> _BatchSlot:
        """Return the memory of one sample of the batch."""
        latents = tuple(tensor[row] for tensor in self.latents)
        return _BatchSlot(
            self.decode_spec, self.pixels[row], self.noise[:, row], self.sizes[row], latents
        )


@dataclass(frozen=True, eq=False)
class _PendingSample:
    """A sample of a batch, read but not decoded."""

    shard: int
    sample: int
    content: SampleBytes


@dataclass(frozen=True, eq=False)
class _PendingBatch:
    """A batch that is being decoded.

    Each of ``slices`` returns for each of its samples the caption, or what is wrong with it.
    """

    epoch_pass: EpochPass
    step: int
    slot: _BatchSlot
    origins: list[tuple[int, int]]
    slices: list[Future[list[str | BadSample]]]


@dataclass(frozen=True, eq=False)
class BatchPipeline:
    """Builds a rank's batches, in the trainer's process or in the loader's.

    ``decode_specs`` are by the schedule's number of the batch shape.
    """

    sampler: Sampler
    reader: ShardReader
    config: DataConfig
    batch_size: int
    decode_specs: tuple[DecodeSpec, ...]
    rng: SampleRng
    precomputed: PrecomputedLatents | None = None
    tokenize: Tokenize | None = None
    decoders: Decoders = field(default_factory=InProcessDecoders)

    def sample_name(self, shard: int, sample: int) -> str:
        """Return a sample's shard and key for messages; reads the sample."""
        content = self.reader.read(shard, sample)
        key = content.key if isinstance(content, BadSample) else sample_members(content)[0]
        return f"{self.reader.shard_name(shard)} {key}"

    def layout(self, shape: int) -> BufferLayout:
        """Return the memory layout of a batch of the schedule's ``shape``."""
        spec, batch = self.decode_specs[shape], self.batch_size
        noise = self.rng.shape(batch, spec.height, spec.width), torch.float32
        sizes = (batch, 4), torch.int32
        if self.precomputed is not None:
            return ((batch, 0), torch.uint8), noise, sizes, *self.precomputed.layout(batch)
        return ((batch, spec.height, spec.width, 3), torch.uint8), noise, sizes

    @property
    def batch_bytes(self) -> int:
        """Size of a buffer that holds a batch of any shape."""
        return max(layout_bytes(self.layout(shape)) for shape in range(len(self.decode_specs)))

    def batches(
        self, decode: Submit, read: Submit, allocate: BufferPool, ahead: int
    ) -> Iterator[Batch]:
        """Yield batches without end; ``ahead`` of them are decoded before they are requested."""
        steps = self._steps(read)
        pending: deque[_PendingBatch] = deque()
        while True:
            while len(pending) <= ahead:
                pending.append(self._start(*next(steps), decode, allocate))
            yield self._finish(pending.popleft())

    def _steps(self, read: Submit) -> Iterator[tuple[EpochPass, int, list[SampleBytes]]]:
        """Yield the steps of all passes, each with the raw samples of its batch.

        Once a pass has requested everything that it needs, the next pass starts to read, so that
        reading does not pause at the end of an epoch.
        """
        passes = self.sampler.passes()
        current = next(passes)
        prefetch = PrefetchBuffer(current, self.reader, read, EARLY_BATCHES)
        while True:
            following: tuple[EpochPass, PrefetchBuffer] | None = None
            for step in range(current.first, current.stop):
                contents = prefetch.take(current.schedule.indices(step))
                if following is None and prefetch.all_requested:
                    upcoming = next(passes)
                    following = upcoming, PrefetchBuffer(upcoming, self.reader, read)
                yield current, step, contents
            assert following is not None  # the last batch of a pass has requested everything
            current, prefetch = following

    def _start(
        self,
        epoch_pass: EpochPass,
        step: int,
        contents: list[SampleBytes],
        decode: Submit,
        allocate: BufferPool,
    ) -> _PendingBatch:
        """Start to decode a batch, in slices of a few samples."""
        schedule = epoch_pass.schedule
        shards, samples = schedule.partition.locate(schedule.indices(step))
        origins = list(zip(shards.tolist(), samples.tolist(), strict=True))
        pending = [
            _PendingSample(*origin, content)
            for origin, content in zip(origins, contents, strict=True)
        ]
        shape = schedule.shape(step)
        pixels, noise, sizes, *latents = allocate(self.layout(shape))
        slot = _BatchSlot(self.decode_specs[shape], pixels, noise, sizes, tuple(latents))
        slices = [
            decode(
                self._decode_slice,
                epoch_pass.epoch,
                pending[first : first + _SLICE_SAMPLES],
                slot,
                first,
            )
            for first in range(0, len(pending), _SLICE_SAMPLES)
        ]
        return _PendingBatch(epoch_pass, step, slot, origins, slices)

    def _finish(self, pending: _PendingBatch) -> Batch:
        """Wait for a batch and replace its bad samples."""
        epoch_pass, step, slot = pending.epoch_pass, pending.step, pending.slot
        outcomes = [outcome for part in pending.slices for outcome in part.result()]
        bad_samples = [outcome for outcome in outcomes if isinstance(outcome, BadSample)]
        captions, origins = [], pending.origins
        for row, outcome in enumerate(outcomes):
            if isinstance(outcome, BadSample):
                caption, origins[row] = self._replacement(
                    epoch_pass, step, row, slot.sample(row), outcome
                )
            else:
                caption = outcome
            captions.append(caption)
        # New samples come first. A bad one among them is replaced by a sample of the same epoch,
        # which makes it a repeated one; the rest of the batch is repeated anyway.
        num_new = len(outcomes) - epoch_pass.num_repeated(step)
        num_replaced = sum(isinstance(outcome, BadSample) for outcome in outcomes[:num_new])
        batch = Batch(
            slot.pixels,
            captions,
            epoch_pass.position(step),
            tuple(bad_samples),
            epoch_pass.num_repeated(step) + num_replaced,
            tuple(origins),
            self.rng.uniform(Purpose.TIMESTEP, epoch_pass.epoch, origins),
            self.rng.uniform(Purpose.CAPTION_DROPOUT, epoch_pass.epoch, origins),
            tokens=self._tokens(captions),
        )
        return batch.with_tensors(slot.pixels, slot.noise, slot.sizes, *slot.latents)

    def _tokens(self, captions: list[str]) -> tuple[NDArray[np.int64], ...]:
        if self.tokenize is None or self.precomputed is not None:
            return ()
        return tuple(ids.numpy() for ids in self.tokenize(captions))

    def _decode_slice(
        self, epoch: int, samples: list[_PendingSample], slot: _BatchSlot, first: int
    ) -> list[str | BadSample]:
        """Decode consecutive samples of a batch; ``first`` is the row of the first one."""
        return [
            self._decode(epoch, sample, slot.sample(first + number))
            for number, sample in enumerate(samples)
        ]

    def _decode(self, epoch: int, sample: _PendingSample, slot: _BatchSlot) -> str | BadSample:
        """Decode a sample, and its noise, into ``slot``; return its caption or what is wrong."""
        outcome = self._decode_content(epoch, sample, slot)
        if isinstance(outcome, str):
            self.rng.fill_normal(slot.noise, epoch, sample.shard, sample.sample)
        return outcome

    def _decode_content(
        self, epoch: int, sample: _PendingSample, slot: _BatchSlot
    ) -> str | BadSample:
        """Decode a sample's image, or copy its latents, into ``slot``."""
        if isinstance(sample.content, BadSample):
            return sample.content
        key, shard = "", self.reader.shard_name(sample.shard)
        try:
            key, members = sample_members(sample.content)
            text = self._caption(epoch, sample, members)
            if text is None:
                sources = [source for source, _ in self.config.captions]
                missing = ", ".join(sources or [self.config.caption_key])
                return BadSample(shard, key, "caption-missing", f"no {missing}")
            if self.precomputed is not None:
                self._read_precomputed(self.precomputed, members, slot)
                return text
            image = _first_member(members, self.config.image_key.split(";"))
            if image is None:
                return BadSample(shard, key, "image-missing", f"no {self.config.image_key}")
            key_of_crop = (epoch, sample.shard, sample.sample)
            decode_with(self.decoders, slot.decode_spec, image, slot.pixels, *key_of_crop)
            flipped = self.config.flip and self._uniform(Purpose.FLIP, epoch, sample) < 0.5
            if flipped:
                slot.pixels.copy_(slot.pixels.flip(1))
            sizes = slot.decode_spec.sizes(image, *key_of_crop, flipped=flipped)
            slot.sizes.copy_(torch.tensor(sizes))
        except json.JSONDecodeError as error:
            return BadSample(shard, key, "json-invalid", str(error))
        except UnicodeDecodeError as error:
            return BadSample(shard, key, "caption-not-utf8", str(error))
        except (TarError, DecodeError, PrecomputedLatentsError) as error:
            return BadSample(shard, key, error.reason, str(error).partition(": ")[2])
        return text

    def _caption(
        self, epoch: int, sample: _PendingSample, members: dict[str, memoryview]
    ) -> str | None:
        """Return the sample's caption in this epoch; None if it has none."""
        if self.config.captions:
            uniform = self._uniform(Purpose.CAPTION, epoch, sample)
            return choose_caption(members, self.config.captions, uniform)
        caption = members.get(self.config.caption_key)
        return None if caption is None else bytes(caption).decode("utf-8")

    def _uniform(self, purpose: Purpose, epoch: int, sample: _PendingSample) -> float:
        return float(self.rng.uniform(purpose, epoch, [(sample.shard, sample.sample)])[0])

    def _read_precomputed(
        self, latents: PrecomputedLatents, members: dict[str, memoryview], slot: _BatchSlot
    ) -> None:
        """Copy a sample's arrays into ``slot``."""
        latents.read(members, slot.latents)
        if latents.has_sizes:
            latents.read_sizes(members, slot.sizes)
            return
        # Shards of an earlier version: as if the image had the training's size.
        spec = slot.decode_spec
        slot.sizes.copy_(torch.tensor((spec.height, spec.width, 0, 0)))

    def _replacement(
        self, epoch_pass: EpochPass, step: int, row: int, slot: _BatchSlot, bad: BadSample
    ) -> tuple[str, tuple[int, int]]:
        """Decode another sample into the slot of a bad one; return its caption and its origin.

        Raises:
            DataError: no candidate can be used.
        """
        index = int(epoch_pass.schedule.indices(step)[row])
        for attempt in range(_MAX_REPLACEMENTS):
            shard, sample = epoch_pass.replacement(index, attempt)
            candidate = _PendingSample(shard, sample, self.reader.read(shard, sample))
            outcome = self._decode(epoch_pass.epoch, candidate, slot)
            if isinstance(outcome, str):
                return outcome, (shard, sample)
        raise DataError(
            f"{bad.shard}: {bad.reason}: {bad.detail}; none of {_MAX_REPLACEMENTS} replacement "
            "samples can be used; pack these shards again"
        )


def _first_member(members: dict[str, memoryview], keys: list[str]) -> memoryview | None:
    return next((members[key] for key in keys if key in members), None)
