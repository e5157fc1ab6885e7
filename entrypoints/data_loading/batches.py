"""Builds a rank's batches from raw samples, decoded by any number of threads.

A bad sample is replaced by another one of its shuffle block. The choice is a pure function of the
sample's index, so every batch is full, and equal in every run.
"""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from sm_train.entrypoints.data_loading.precomputed_latents import (
    PrecomputedLatents,
    PrecomputedLatentsError,
)
from sm_train.entrypoints.data_loading.sampler import DataPosition, EpochSize
from sm_train.entrypoints.data_loading.shard_reader import BadSample, Removed, SampleBytes, Submit
from sm_train.entrypoints.images.buffer_pool import BufferLayout, BufferPool, layout_bytes
from sm_train.entrypoints.images.decoder_pool import Decoders, InProcessDecoders
from sm_train.entrypoints.images.extra_decoder import decode_extra, extra_layout
from sm_train.entrypoints.images.image_decoder import DecodeSpec, decode_with
from sm_train.entrypoints.images.image_header import DecodeError
from sm_train.entrypoints.job_interface.job_config import DataConfig
from sm_train.entrypoints.sample_metadata.captions import (
    caption_text,
    choose_caption,
    describe_source,
)
from sm_train.entrypoints.sample_metadata.sample_rng import Purpose, SampleRng
from sm_train.entrypoints.sample_metadata.transform import TransformError, apply_transform
from sm_train.entrypoints.shards.removed_samples import RemovalNotice, RemovedSamples
from sm_train.entrypoints.shards.shard_format import DataError
from sm_train.entrypoints.shards.tar_reader import TarError, sample_members
from torch import Tensor

Tokenize = Callable[[Sequence[str]], Sequence[Tensor]]
"""Turns captions into token ids (B, L) for each text encoder; sent to the loader's process."""

_SLICE_SAMPLES = 4
"""Samples that a thread decodes in one task."""

_MAX_REPLACEMENTS = 64
_EMPTY = torch.empty(0)


@dataclass(frozen=True, eq=False)
class SampleMembers:
    """A sample's files by their extension."""

    key: str
    members: Mapping[str, memoryview]


@dataclass(frozen=True, eq=False)
class RawSample:
    """A sample of a batch, read but not decoded: ``sample`` of ``shard``, both integers.

    ``content`` is its part of the tar, its files, or why it could not be read.
    """

    shard: int
    sample: int
    content: SampleBytes | SampleMembers


@dataclass(frozen=True, eq=False)
class RawBatch:
    """The samples of a batch, read but not decoded.

    ``epoch`` makes a sample's random numbers differ from those of its other appearances.
    ``shape`` is the number of the decode spec, ``position`` the run's position after the batch.
    The last ``num_repeated`` samples were read before in this epoch. ``replacement(row, attempt)``
    reads another sample for one that cannot be used.
    """

    epoch: int
    samples: list[RawSample]
    shape: int
    position: DataPosition
    num_repeated: int
    replacement: Callable[[int, int], RawSample]


class Reader(Protocol):
    """Chooses and reads a rank's samples; ``data.reader`` selects the implementation.

    ``position`` is where it starts. ``resume_warning`` is set if a resumed run does not continue
    with the very next samples, and ``resume_code`` is the code of that event. ``order_note`` is set
    if the order depends on the number of ranks: it says why.
    """

    resume_code: str
    position: DataPosition
    resume_warning: str | None
    order_note: str | None

    def batches(self, read: Submit) -> Iterator[RawBatch]:
        """Yield batches without end; ``read`` runs a call in a thread that reads."""
        ...

    def shard_name(self, shard: int) -> str:
        """Return a shard's file name."""
        ...

    def epoch_size(self, epoch: int) -> EpochSize:
        """Return the size of an epoch."""
        ...

    def state_at(self, position: DataPosition) -> bytes:
        """Return what resumes a run at ``position``; equal on all ranks."""
        ...


@dataclass(frozen=True)
class Batch:
    """A decoded batch of B samples.

    ``pixels`` is uint8 (B, H, W, 3) and ``position`` the run's position after this batch.

    If the shards carry latents for this resolution, ``moments`` (B, 2 × channels, h, w), ``text``
    (B, tokens, width) and for some models ``pooled`` (B, width) are set, float16, and ``pixels``
    is (B, 0). Otherwise ``tokens`` are the captions' token ids (B, L) for each tokenizer.

    ``is_new``, bool (B,), is false for samples that were read before in this epoch: they replace
    bad ones, or pad the batches of a rank that has fewer samples than others. ``origins`` are the
    shard and the sample number of each sample, ``names`` its shard's file name and its key.

    ``sizes`` (B, 4), int32, are the height and width of each original image and the top and left of
    its crop (:meth:`DecodeSpec.sizes`).

    ``extras`` are further files of the samples, by name (:mod:`extra_decoder
    <sm_train.entrypoints.images.extra_decoder>`).

    ``replaced`` are the shard and the sample number of each sample that was read instead of another
    one, and those of the other one.

    ``removals`` is set in the first batch of an epoch, if samples are removed or may be.

    ``noise`` (kinds, B, C, h, w) is the model's. ``timestep_uniform`` and ``dropout_uniform``
    (B,), in (0, 1), choose the timesteps and the captions to drop:
    :mod:`sm_train.entrypoints.sample_metadata.sample_rng`.
    """

    pixels: Tensor
    captions: list[str]
    position: DataPosition
    bad_samples: tuple[BadSample, ...]
    is_new: NDArray[np.bool_]
    origins: tuple[tuple[int, int], ...]
    names: tuple[str, ...]
    timestep_uniform: NDArray[np.float64]
    dropout_uniform: NDArray[np.float64]
    noise: Tensor = _EMPTY
    sizes: Tensor = _EMPTY
    moments: Tensor | None = None
    text: Tensor | None = None
    pooled: Tensor | None = None
    tokens: tuple[NDArray[np.int64], ...] = ()
    extras: Mapping[str, Tensor] = field(default_factory=dict)
    replaced: tuple[tuple[tuple[int, int], tuple[int, int]], ...] = ()
    removals: tuple[RemovalNotice, ...] = ()

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that are set, in the order of :meth:`with_tensors`."""
        latents = (self.moments, self.text, self.pooled)
        set_latents = (tensor for tensor in latents if tensor is not None)
        return self.pixels, self.noise, self.sizes, *self.extras.values(), *set_latents

    def with_tensors(
        self, pixels: Tensor, noise: Tensor = _EMPTY, sizes: Tensor = _EMPTY, *others: Tensor
    ) -> Batch:
        """Return the same batch with its tensors in other memory.

        ``others`` are the extras, then the latents; without them both become empty.
        """
        count = len(self.extras)
        extras = dict(zip(self.extras, others[:count] or (_EMPTY,) * count, strict=True))
        moments, text, pooled = (*others[count:], None, None, None)[:3]
        moved = replace(self, pixels=pixels, noise=noise, sizes=sizes, extras=extras)
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
    extras: tuple[Tensor, ...]
    latents: tuple[Tensor, ...]

    def sample(self, row: int) -> _BatchSlot:
        """Return the memory of one sample of the batch."""
        return _BatchSlot(
            self.decode_spec,
            self.pixels[row],
            self.noise[:, row],
            self.sizes[row],
            tuple(tensor[row] for tensor in self.extras),
            tuple(tensor[row] for tensor in self.latents),
        )


@dataclass(frozen=True)
class _Decoded:
    """What a decoded sample has besides its tensors."""

    key: str
    caption: str


@dataclass(frozen=True, eq=False)
class _PendingBatch:
    """A batch that is being decoded.

    Each of ``slices`` returns for each of its samples the caption, or what is wrong with it.
    """

    raw: RawBatch
    slot: _BatchSlot
    slices: list[Future[list[_Decoded | BadSample]]]
    removals: tuple[RemovalNotice, ...]


@dataclass(frozen=True, eq=False)
class BatchPipeline:
    """Builds a rank's batches, in the trainer's process or in the loader's.

    ``decode_specs`` are by the number of the batch shape.
    """

    reader: Reader
    config: DataConfig
    batch_size: int
    decode_specs: tuple[DecodeSpec, ...]
    rng: SampleRng
    precomputed: PrecomputedLatents | None = None
    tokenize: Tokenize | None = None
    decoders: Decoders = field(default_factory=InProcessDecoders)
    removed: RemovedSamples = field(default_factory=RemovedSamples)

    def layout(self, shape: int) -> BufferLayout:
        """Return the memory layout of a batch of this ``shape``."""
        spec, batch = self.decode_specs[shape], self.batch_size
        noise = self.rng.shape(batch, spec.height, spec.width), torch.float32
        sizes = (batch, 4), torch.int32
        if self.precomputed is not None:
            return ((batch, 0), torch.uint8), noise, sizes, *self.precomputed.layout(batch)
        pixels = (batch, spec.height, spec.width, 3), torch.uint8
        extras = (extra_layout(extra, batch, spec) for extra in self.config.extras)
        return pixels, noise, sizes, *extras

    @property
    def batch_bytes(self) -> int:
        """Size of a buffer that holds a batch of any shape."""
        return max(layout_bytes(self.layout(shape)) for shape in range(len(self.decode_specs)))

    def batches(
        self, decode: Submit, read: Submit, allocate: BufferPool, ahead: int
    ) -> Iterator[Batch]:
        """Yield batches without end; ``ahead`` of them are decoded before they are requested."""
        raw_batches = self.reader.batches(read)
        # The first batch does not wait until the samples of the next ones are read.
        yield self._finish(self._start(next(raw_batches), decode, allocate))
        pending: deque[_PendingBatch] = deque()
        while True:
            while len(pending) <= ahead:
                pending.append(self._start(next(raw_batches), decode, allocate))
            yield self._finish(pending.popleft())

    def _start(self, raw: RawBatch, decode: Submit, allocate: BufferPool) -> _PendingBatch:
        """Start to decode a batch, in slices of a few samples."""
        removals = self.removed.enter(raw.position.epoch)
        pixels, noise, sizes, *others = allocate(self.layout(raw.shape))
        # Either extras or latents.
        extras, latents = (others, []) if self.precomputed is None else ([], others)
        slot = _BatchSlot(
            self.decode_specs[raw.shape], pixels, noise, sizes, tuple(extras), tuple(latents)
        )
        slices = [
            decode(
                self._decode_slice,
                raw.epoch,
                raw.samples[first : first + _SLICE_SAMPLES],
                slot,
                first,
            )
            for first in range(0, len(raw.samples), _SLICE_SAMPLES)
        ]
        return _PendingBatch(raw, slot, slices, removals)

    def _finish(self, pending: _PendingBatch) -> Batch:
        """Wait for a batch and replace its bad samples."""
        raw, slot = pending.raw, pending.slot
        outcomes = [outcome for part in pending.slices for outcome in part.result()]
        bad_samples = [
            outcome
            for outcome in outcomes
            if isinstance(outcome, BadSample) and not isinstance(outcome, Removed)
        ]
        samples, decoded = list(raw.samples), []
        for row, outcome in enumerate(outcomes):
            if isinstance(outcome, BadSample):
                samples[row], replaced = self._replace(raw, row, slot.sample(row), outcome)
                decoded.append(replaced)
            else:
                decoded.append(outcome)
        # The sample that replaces a bad one is another one of the epoch.
        num_new = len(outcomes) - raw.num_repeated
        is_new = [isinstance(outcome, _Decoded) for outcome in outcomes[:num_new]]
        origins = [(sample.shard, sample.sample) for sample in samples]
        planned = [(sample.shard, sample.sample) for sample in raw.samples]
        captions = [sample.caption for sample in decoded]
        batch = Batch(
            slot.pixels,
            captions,
            raw.position,
            tuple(bad_samples),
            np.array([*is_new, *[False] * raw.num_repeated]),
            tuple(origins),
            tuple(
                f"{self.reader.shard_name(sample.shard)} {decoded_sample.key}"
                for sample, decoded_sample in zip(samples, decoded, strict=True)
            ),
            self.rng.uniform(Purpose.TIMESTEP, raw.epoch, origins),
            self.rng.uniform(Purpose.CAPTION_DROPOUT, raw.epoch, origins),
            tokens=self._tokens(captions),
            extras={extra.name: _EMPTY for extra in self.config.extras},
            replaced=tuple(
                (origin, skipped)
                for origin, skipped, outcome in zip(origins, planned, outcomes, strict=True)
                if isinstance(outcome, BadSample)
            ),
            removals=pending.removals,
        )
        others = (*slot.extras, *slot.latents)
        return batch.with_tensors(slot.pixels, slot.noise, slot.sizes, *others)

    def _tokens(self, captions: list[str]) -> tuple[NDArray[np.int64], ...]:
        if self.tokenize is None or self.precomputed is not None:
            return ()
        return tuple(ids.numpy() for ids in self.tokenize(captions))

    def _decode_slice(
        self, epoch: int, samples: list[RawSample], slot: _BatchSlot, first: int
    ) -> list[_Decoded | BadSample]:
        """Decode consecutive samples of a batch; ``first`` is the row of the first one."""
        return [
            self._decode(epoch, sample, slot.sample(first + number))
            for number, sample in enumerate(samples)
        ]

    def _decode(self, epoch: int, sample: RawSample, slot: _BatchSlot) -> _Decoded | BadSample:
        """Decode a sample, and its noise, into ``slot``; return the rest or what is wrong."""
        outcome = self._decode_content(epoch, sample, slot)
        if isinstance(outcome, _Decoded):
            self.rng.fill_normal(slot.noise, epoch, sample.shard, sample.sample)
        return outcome

    def _decode_content(
        self, epoch: int, sample: RawSample, slot: _BatchSlot
    ) -> _Decoded | BadSample:
        """Decode a sample's image, or copy its latents, into ``slot``."""
        if isinstance(sample.content, BadSample):
            return sample.content
        key, shard = "", self.reader.shard_name(sample.shard)
        try:
            key, members = _members(sample.content)
            if self.removed.contains(sample.shard, key):
                return Removed(shard, key)
            if self.config.transform is not None:
                members = apply_transform(self.config.transform, key, members)
            text = self._caption(epoch, sample, members)
            if text is None:
                sources = map(describe_source, self.config.caption)
                missing = ", ".join(sources) or self.config.caption_key
                return BadSample(shard, key, "caption-missing", f"no {missing}")
            if self.precomputed is not None:
                self._read_precomputed(self.precomputed, members, slot)
                return _Decoded(key, text)
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
            for extra, out in zip(self.config.extras, slot.extras, strict=True):
                content = members.get(extra.member)
                if content is None:
                    return BadSample(shard, key, "extra-missing", f"no {extra.member}")
                decode_extra(
                    self.decoders,
                    extra,
                    content,
                    image,
                    slot.decode_spec,
                    out,
                    *key_of_crop,
                    flipped=flipped,
                )
        except json.JSONDecodeError as error:
            return BadSample(shard, key, "json-invalid", str(error))
        except UnicodeDecodeError as error:
            return BadSample(shard, key, "caption-not-utf8", str(error))
        except (TarError, DecodeError, PrecomputedLatentsError, TransformError) as error:
            return BadSample(shard, key, error.reason, str(error).partition(": ")[2])
        return _Decoded(key, text)

    def _caption(
        self, epoch: int, sample: RawSample, members: Mapping[str, memoryview]
    ) -> str | None:
        """Return the sample's caption in this epoch; None if it has none."""
        if self.config.caption:
            uniform = self._uniform(Purpose.CAPTION, epoch, sample)
            return choose_caption(members, self.config.caption, uniform)
        caption = members.get(self.config.caption_key)
        return None if caption is None else caption_text(caption)

    def _uniform(self, purpose: Purpose, epoch: int, sample: RawSample) -> float:
        return float(self.rng.uniform(purpose, epoch, [(sample.shard, sample.sample)])[0])

    def _read_precomputed(
        self, latents: PrecomputedLatents, members: Mapping[str, memoryview], slot: _BatchSlot
    ) -> None:
        """Copy a sample's arrays into ``slot``."""
        latents.read(members, slot.latents)
        if latents.has_sizes:
            latents.read_sizes(members, slot.sizes)
            return
        # Shards of an earlier version: as if the image had the training's size.
        spec = slot.decode_spec
        slot.sizes.copy_(torch.tensor((spec.height, spec.width, 0, 0)))

    def _replace(
        self, raw: RawBatch, row: int, slot: _BatchSlot, bad: BadSample
    ) -> tuple[RawSample, _Decoded]:
        """Decode another sample into the slot of a bad one.

        Raises:
            DataError: no candidate can be used.
        """
        for attempt in range(_MAX_REPLACEMENTS):
            candidate = raw.replacement(row, attempt)
            outcome = self._decode(raw.epoch, candidate, slot)
            if isinstance(outcome, _Decoded):
                return candidate, outcome
        if isinstance(bad, Removed):
            raise DataError(
                f"{bad.shard}: {bad.key} was removed, and none of {_MAX_REPLACEMENTS} replacement "
                "samples can be used; complete `sm-train remove`, then start again"
            )
        raise DataError(
            f"{bad.shard}: {bad.reason}: {bad.detail}; none of {_MAX_REPLACEMENTS} replacement "
            "samples can be used; pack these shards again"
        )


def _members(content: memoryview | SampleMembers) -> tuple[str, Mapping[str, memoryview]]:
    """Return a sample's key, and its files by extension.

    Raises:
        TarError: its part of the tar is damaged.
    """
    if isinstance(content, SampleMembers):
        return content.key, content.members
    return sample_members(content)


def _first_member(members: Mapping[str, memoryview], keys: list[str]) -> memoryview | None:
    return next((members[key] for key in keys if key in members), None)


MIN_BAD_SAMPLES = 10
"""Up to this many bad samples never stop a job, whatever fraction they are."""

_MAX_NAMED = 5
"""Shards or samples that a message names."""


class BadSampleTracker:
    """Counts the bad samples of one rank by reason; ``max_fraction`` of all are tolerated.

    ``num_seen`` counts all samples. :attr:`report_is_due` holds at the first bad sample, and
    whenever their number has doubled since the last report.
    """

    def __init__(self, max_fraction: float) -> None:
        self.max_fraction = max_fraction
        self.num_seen = 0
        self.reasons: Counter[str] = Counter()
        self._next_report = 1
        self._shards: Counter[str] = Counter()
        self._unreported: list[BadSample] = []

    @property
    def num_bad(self) -> int:
        """Bad samples so far."""
        return self.reasons.total()

    @property
    def report_is_due(self) -> bool:
        return self.num_bad >= self._next_report

    def add(self, batch: Batch) -> None:
        """Count a batch.

        Raises:
            DataError: more than 10 samples, and more than ``max_fraction`` of all, were bad.
        """
        self.num_seen += len(batch.captions)
        self.reasons.update(bad.reason for bad in batch.bad_samples)
        self._shards.update(bad.shard for bad in batch.bad_samples)
        self._unreported += batch.bad_samples
        if self.num_bad > MIN_BAD_SAMPLES and self.num_bad > self.max_fraction * self.num_seen:
            names = ", ".join(name for name, _ in self._shards.most_common(_MAX_NAMED))
            raise DataError(
                f"{self.num_bad} of {self.num_seen} samples cannot be used "
                f"({_format_reasons(self.reasons)}), in {names}; pack these shards again, or raise "
                f"data.max_bad_fraction above {self.max_fraction}"
            )

    def report(self) -> tuple[str, dict[str, int]] | None:
        """Return a message about the samples skipped since the last report, and all counts.

        None if no sample was skipped since.
        """
        if not self._unreported:
            return None
        reasons = Counter(bad.reason for bad in self._unreported)
        samples = "; ".join(
            f"{bad.shard} {bad.key}: {bad.detail}".replace(" :", ":")
            for bad in self._unreported[:_MAX_NAMED]
        )
        more = "; …" if len(self._unreported) > _MAX_NAMED else ""
        message = (
            f"skipped {len(self._unreported)} samples ({_format_reasons(reasons)}): {samples}"
            f"{more}; {self.num_bad} of {self.num_seen} so far"
        )
        self._unreported.clear()
        self._next_report = 2 * self.num_bad
        return message, dict(self.reasons)


def _format_reasons(reasons: Counter[str]) -> str:
    return ", ".join(f"{reason} {count}" for reason, count in reasons.most_common())
