"""Batches of one process, from raw samples: decoded by threads, the same however many there are.

A bad sample's place is taken by another of its window, which is a pure function of the place too:
every batch is full, and the same in every run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from sm_train.entrypoints.common.job_config import DataConfig
from sm_train.entrypoints.common.sample_rng import CAPTION, TIMESTEP, SampleRng
from sm_train.entrypoints.data.buffer_pool import BufferLayout, BufferPool, layout_bytes
from sm_train.entrypoints.data.image_decoder import DecodeSpec
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
"""From captions to token ids (B, L) for each text encoder; crosses to the loader's process."""

_SLICE = 4  # samples that a thread decodes before it takes the next
_REPLACEMENTS = 64
_NONE = torch.empty(0)


@dataclass(frozen=True)
class Batch:
    """``pixels`` is uint8 (B, H, W, 3); ``position`` is the run's, after this batch.

    Where the shards carry them for this resolution, ``moments`` (B, 2 × channels, h, w), ``text``
    (B, tokens, width) and of some models ``pooled`` (B, width) are there, float16, and ``pixels``
    has no rows. ``repeated``
    samples were read before: in place of bad ones, or because other processes have more to read.
    ``origins`` are the samples themselves: shard and place in it. ``tokens`` are the captions'
    token ids (B, L) for each tokenizer; none where ``text`` is there.

    ``noise`` (kinds, B, C, h, w) is the model's, ``levels`` and ``dropout`` (B,) in (0, 1) choose
    timesteps and captions that are left out: :mod:`sm_train.entrypoints.common.sample_rng`.
    """

    pixels: Tensor
    captions: list[str]
    position: DataPosition
    bad_samples: tuple[BadSample, ...]
    num_repeated: int
    origins: tuple[tuple[int, int], ...]
    timestep_uniform: NDArray[np.float64]
    dropout_uniform: NDArray[np.float64]
    noise: Tensor = _NONE
    moments: Tensor | None = None
    text: Tensor | None = None
    pooled: Tensor | None = None
    tokens: tuple[NDArray[np.int64], ...] = ()

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Those that are there."""
        everything = (self.pixels, self.noise, self.moments, self.text, self.pooled)
        return tuple(one for one in everything if one is not None)

    def with_tensors(self, pixels: Tensor, noise: Tensor = _NONE, *latents: Tensor) -> Batch:
        """The same batch in other memory."""
        moments, text, pooled = (*latents, None, None, None)[:3]
        return replace(self, pixels=pixels, noise=noise, moments=moments, text=text, pooled=pooled)

    def pin_memory(self) -> Batch:
        return self.with_tensors(*(one.pin_memory() for one in self.tensors))


@dataclass(frozen=True)
class _BatchSlot:
    """Where a batch, a slice of it or one sample of it is decoded to."""

    target: DecodeSpec
    pixels: Tensor
    noise: Tensor
    latents: tuple[Tensor, ...]

    def at(self, place: int) -> _BatchSlot:
        latents = tuple(one[place] for one in self.latents)
        return _BatchSlot(self.target, self.pixels[place], self.noise[:, place], latents)


@dataclass(frozen=True, eq=False)
class _PendingSample:
    """One sample of a batch, and what was read for it."""

    shard: int
    sample: int
    content: SampleBytes


@dataclass(frozen=True, eq=False)
class _PendingBatch:
    """A batch on its way: its slices come with a caption or what is wrong for each place."""

    lap: EpochPass
    step: int
    room: _BatchSlot
    origins: list[tuple[int, int]]
    slices: list[Future[list[str | BadSample]]]


@dataclass(frozen=True, eq=False)
class BatchPipeline:
    """Makes a process's batches, wherever it runs; ``targets`` are by the schedule's shapes."""

    sampler: Sampler
    reader: ShardReader
    config: DataConfig
    batch_size: int
    decode_specs: tuple[DecodeSpec, ...]
    rng: SampleRng
    precomputed: PrecomputedLatents | None = None
    tokenize: Tokenize | None = None

    def sample_name(self, shard: int, sample: int) -> str:
        """A sample's shard and key, for a person."""
        content = self.reader.read(shard, sample)
        key = content.key if isinstance(content, BadSample) else sample_members(content)[0]
        return f"{self.reader.shard_name(shard)} {key}"

    def layout(self, shape: int) -> BufferLayout:
        """What a batch of the schedule's ``shape`` looks like in memory."""
        target, batch = self.decode_specs[shape], self.batch_size
        noise = self.rng.shape(batch, target.height, target.width), torch.float32
        if self.precomputed is not None:
            return ((batch, 0), torch.uint8), noise, *self.precomputed.layout(batch)
        return ((batch, target.height, target.width, 3), torch.uint8), noise

    @property
    def batch_bytes(self) -> int:
        """Of memory that holds any batch."""
        return max(layout_bytes(self.layout(shape)) for shape in range(len(self.decode_specs)))

    def batches(
        self, decode: Submit, read: Submit, memory: BufferPool, ahead: int
    ) -> Iterator[Batch]:
        """An endless stream; ``ahead`` batches are begun before they are needed."""
        steps = self._steps(read)
        pending: deque[_PendingBatch] = deque()
        while True:
            while len(pending) <= ahead:
                pending.append(self._begin(*next(steps), decode, memory))
            yield self._finish(pending.popleft())

    def _steps(self, read: Submit) -> Iterator[tuple[EpochPass, int, list[SampleBytes]]]:
        laps = self.sampler.passes()
        lap = next(laps)
        stock = PrefetchBuffer(lap, self.reader, read)
        while True:
            following: tuple[EpochPass, PrefetchBuffer] | None = None
            for step in range(lap.first, lap.stop):
                contents = stock.take(lap.schedule.indices(step))
                if following is None and stock.all_requested:
                    upcoming = next(laps)
                    following = upcoming, PrefetchBuffer(upcoming, self.reader, read)
                yield lap, step, contents
            assert following is not None  # by its last batch a lap has begun to read everything
            lap, stock = following

    def _begin(
        self,
        lap: EpochPass,
        step: int,
        contents: list[SampleBytes],
        decode: Submit,
        memory: BufferPool,
    ) -> _PendingBatch:
        schedule = lap.schedule
        shards, samples = schedule.partition.locate(schedule.indices(step))
        origins = list(zip(shards.tolist(), samples.tolist(), strict=True))
        places = [
            _PendingSample(*one, content) for one, content in zip(origins, contents, strict=True)
        ]
        shape = schedule.shape(step)
        pixels, noise, *latents = memory(self.layout(shape))
        room = _BatchSlot(self.decode_specs[shape], pixels, noise, tuple(latents))
        slices = [
            decode(self._decode_slice, lap.epoch, places[first : first + _SLICE], room, first)
            for first in range(0, len(places), _SLICE)
        ]
        return _PendingBatch(lap, step, room, origins, slices)

    def _finish(self, pending: _PendingBatch) -> Batch:
        lap, step, room = pending.lap, pending.step, pending.room
        outcomes = [outcome for part in pending.slices for outcome in part.result()]
        bad = [outcome for outcome in outcomes if isinstance(outcome, BadSample)]
        captions, origins = [], pending.origins
        for place, outcome in enumerate(outcomes):
            if isinstance(outcome, BadSample):
                caption, origins[place] = self._replacement(
                    lap, step, place, room.at(place), outcome
                )
            else:
                caption = outcome
            captions.append(caption)
        fresh = len(outcomes) - lap.num_repeated(step)
        spoilt = sum(isinstance(outcome, BadSample) for outcome in outcomes[:fresh])
        batch = Batch(
            room.pixels,
            captions,
            lap.position(step),
            tuple(bad),
            lap.num_repeated(step) + spoilt,
            tuple(origins),
            self.rng.uniform(TIMESTEP, lap.epoch, origins),
            self.rng.uniform(CAPTION, lap.epoch, origins),
            tokens=self._tokens(captions),
        )
        return batch.with_tensors(room.pixels, room.noise, *room.latents)

    def _tokens(self, captions: list[str]) -> tuple[NDArray[np.int64], ...]:
        if self.tokenize is None or self.precomputed is not None:
            return ()
        return tuple(ids.numpy() for ids in self.tokenize(captions))

    def _decode_slice(
        self, epoch: int, places: list[_PendingSample], room: _BatchSlot, first: int
    ) -> list[str | BadSample]:
        return [
            self._decode(epoch, place, room.at(first + number))
            for number, place in enumerate(places)
        ]

    def _decode(self, epoch: int, place: _PendingSample, room: _BatchSlot) -> str | BadSample:
        """The caption; the image or its latents, and the sample's noise, go into ``room``."""
        outcome = self._read(epoch, place, room)
        if isinstance(outcome, str):
            self.rng.fill_normal(room.noise, epoch, place.shard, place.sample)
        return outcome

    def _read(self, epoch: int, place: _PendingSample, room: _BatchSlot) -> str | BadSample:
        if isinstance(place.content, BadSample):
            return place.content
        key, shard = "", self.reader.shard_name(place.shard)
        try:
            key, members = sample_members(place.content)
            if (caption := members.get(self.config.caption_key)) is None:
                return BadSample(shard, key, "caption-missing", f"no {self.config.caption_key}")
            text = bytes(caption).decode("utf-8")
            if self.precomputed is not None:
                self.precomputed.read(members, room.latents)
                return text
            image = _first(members, self.config.image_key.split(";"))
            if image is None:
                return BadSample(shard, key, "image-missing", f"no {self.config.image_key}")
            room.target.decode(image, room.pixels, epoch, place.shard, place.sample)
        except UnicodeDecodeError as error:
            return BadSample(shard, key, "caption-not-utf8", str(error))
        except (TarError, DecodeError, PrecomputedLatentsError) as error:
            return BadSample(shard, key, error.reason, str(error).partition(": ")[2])
        return text

    def _replacement(
        self, lap: EpochPass, step: int, place: int, room: _BatchSlot, bad: BadSample
    ) -> tuple[str, tuple[int, int]]:
        slot = int(lap.schedule.indices(step)[place])
        for attempt in range(_REPLACEMENTS):
            shard, sample = lap.replacement(slot, attempt)
            found = _PendingSample(shard, sample, self.reader.read(shard, sample))
            outcome = self._decode(lap.epoch, found, room)
            if isinstance(outcome, str):
                return outcome, (shard, sample)
        raise DataError(
            f"{bad.shard}: {bad.reason}: {bad.detail}; and of {_REPLACEMENTS} others "
            "of its instance none can be used; pack these shards again"
        )


def _first(members: dict[str, memoryview], keys: list[str]) -> memoryview | None:
    return next((members[key] for key in keys if key in members), None)
