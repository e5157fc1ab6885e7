"""Finds images that duplicate an earlier one, by their bytes or their perceptual hashes.

The first of several duplicates in input order is kept, so the result does not depend on which node
reads which image. Deduplication is a separate pass over all inputs; its digests are stored until
the pack is finished.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

from sm_train.entrypoints.data.shard_index import RejectedInput
from sm_train.entrypoints.images.decoder_pool import Decoders
from sm_train.entrypoints.images.image_header import DecodeError
from sm_train.entrypoints.packing.perceptual_hash import near_duplicates
from sm_train.entrypoints.packing.plan import PackInput, PackOptions, ShardPlan
from sm_train.entrypoints.packing.shard_builder import (
    PACK_STATE,
    InputReader,
    ProgressCallback,
    read_metadata,
)
from sm_train.entrypoints.packing.storage import S3Access, Storage
from sm_train.entrypoints.packing.worker_pool import (
    PackProgress,
    WorkerPlan,
    run_tasks,
    split_cores,
)

_Digest = tuple[str, int | None]
"""An image's SHA-256 and its perceptual hash."""


def digest_shards(
    plans: Sequence[ShardPlan], work: WorkerPlan, on_progress: Callable[[PackProgress], None]
) -> None:
    """Compute and store the digests of all inputs of ``plans`` that are not stored yet."""
    total = sum(len(plan.inputs) for plan in plans)
    missing = [plan for plan in plans if work.destination.size(digests_name(plan)) is None]
    processes, threads = split_cores(missing, work, max_processes=work.workers)
    task = partial(_digest_shard, work.destination, work.access, threads)
    for progress in run_tasks(task, missing, processes, work.decoders(processes)):
        on_progress(replace(progress, total=total, label="1/2 hashing"))


def find_duplicates(plans: Sequence[ShardPlan], destination: Storage) -> dict[int, RejectedInput]:
    """Return the duplicates to leave out, by input number. All digests must be stored."""
    inputs = [item for plan in plans for item in plan.inputs]
    digests = [digest for plan in plans for digest in _read_digests(destination, plan)]
    return duplicates(inputs, digests, plans[0].options)


def duplicates(
    inputs: Sequence[PackInput], digests: Sequence[_Digest | None], options: PackOptions
) -> dict[int, RejectedInput]:
    """Return the duplicates to leave out; a digest of None (unreadable image) matches no other."""
    rejected: dict[int, RejectedInput] = {}
    first_of: dict[str, int] = {}
    for index, digest in enumerate(digests):
        if digest is not None and (first := first_of.setdefault(digest[0], index)) != index:
            detail = f"has the same bytes as {inputs[first].source}"
            rejected[index] = RejectedInput(inputs[index].source, "duplicate", detail)
    if options.near_bits is not None:
        hashes = [
            None if digest is None or index in rejected else digest[1]
            for index, digest in enumerate(digests)
        ]
        for index, first in near_duplicates(hashes, options.near_bits).items():
            detail = f"looks like {inputs[first].source}"
            rejected[index] = RejectedInput(inputs[index].source, "near-duplicate", detail)
    return {inputs[index].number: rejection for index, rejection in rejected.items()}


def digests_name(plan: ShardPlan) -> str:
    """Return the name of a shard's digests in the destination."""
    return f"{PACK_STATE}/{plan.name}.digests.json"


def _digest_shard(
    destination: Storage,
    access: S3Access,
    threads: int,
    plan: ShardPlan,
    on_progress: ProgressCallback,
    decoders: Decoders,
) -> None:
    reader = InputReader(access, decoders)

    def digest_input(item: PackInput) -> _Digest | None:
        try:
            _, metadata = read_metadata(item, plan.options, reader)
        except DecodeError:
            return None
        return metadata.sha256, metadata.phash

    digests: list[_Digest | None] = []
    with ThreadPoolExecutor(threads) as pool:
        for digest in pool.map(digest_input, plan.inputs):
            digests.append(digest)
            on_progress(1, 0, 0)
    with destination.atomic_writer(digests_name(plan)) as sink:
        sink.write(json.dumps(digests).encode())


def _read_digests(destination: Storage, plan: ShardPlan) -> Iterator[_Digest | None]:
    for digest in json.loads(destination.read(digests_name(plan))):
        yield None if digest is None else (digest[0], digest[1])
