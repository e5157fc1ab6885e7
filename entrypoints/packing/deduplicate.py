"""Images that are there already: told by their bytes or by their perceptual hashes.

The first in the order of the inputs stays, so the answer does not depend on who looked at what.
It takes a pass of its own over all inputs, whose results are kept until the pack is finished.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

from sm_train.entrypoints.data.image_header import DecodeError
from sm_train.entrypoints.data.shard_index import RejectedInput
from sm_train.entrypoints.packing.perceptual_hash import near_duplicates
from sm_train.entrypoints.packing.plan import PackInput, PackOptions, ShardPlan
from sm_train.entrypoints.packing.shard_builder import WORK, ProgressCallback, read_metadata
from sm_train.entrypoints.packing.storage import S3Access, Storage
from sm_train.entrypoints.packing.worker_pool import PackProgress, WorkerPlan, run, split_cores

_Digest = tuple[str, int | None]
"""An image's SHA-256 and its perceptual hash."""


def digest_shards(
    plans: Sequence[ShardPlan], work: WorkerPlan, on_progress: Callable[[PackProgress], None]
) -> None:
    """Take the digests of all inputs of ``plans``, where they are not kept already."""
    total = sum(len(plan.inputs) for plan in plans)
    missing = [plan for plan in plans if work.destination.size(digests_name(plan)) is None]
    processes, threads = split_cores(missing, work, at_most=work.workers)
    task = partial(_digest_shard, work.destination, work.access, threads)
    for tally in run(task, missing, processes):
        on_progress(replace(tally, total=total))


def find_duplicates(plans: Sequence[ShardPlan], destination: Storage) -> dict[int, RejectedInput]:
    """The inputs to leave out, by number, now that the digests of all shards are there."""
    inputs = [item for plan in plans for item in plan.inputs]
    digests = [digest for plan in plans for digest in _read(destination, plan)]
    return duplicates(inputs, digests, plans[0].options)


def duplicates(
    inputs: Sequence[PackInput], digests: Sequence[_Digest | None], options: PackOptions
) -> dict[int, RejectedInput]:
    """The inputs to leave out; an image that could not be read is like no other."""
    rejected: dict[int, RejectedInput] = {}
    first: dict[str, int] = {}
    for number, digest in enumerate(digests):
        if digest is not None and (same := first.setdefault(digest[0], number)) != number:
            detail = f"has the same bytes as {inputs[same].source}"
            rejected[number] = RejectedInput(inputs[number].source, "duplicate", detail)
    if options.near_bits is not None:
        hashes = [
            None if digest is None or number in rejected else digest[1]
            for number, digest in enumerate(digests)
        ]
        for number, same in near_duplicates(hashes, options.near_bits).items():
            detail = f"looks like {inputs[same].source}"
            rejected[number] = RejectedInput(inputs[number].source, "near-duplicate", detail)
    return {inputs[number].number: one for number, one in rejected.items()}


def digests_name(plan: ShardPlan) -> str:
    """Where a shard's digests are kept below the destination."""
    return f"{WORK}/{plan.name}.digests.json"


def _digest_shard(
    destination: Storage, access: S3Access, threads: int, plan: ShardPlan, tell: ProgressCallback
) -> None:
    def look(item: PackInput) -> _Digest | None:
        try:
            _, facts = read_metadata(item, plan.options, access)
        except DecodeError:
            return None
        return facts.sha256, facts.phash

    found: list[_Digest | None] = []
    with ThreadPoolExecutor(threads) as pool:
        for digest in pool.map(look, plan.inputs):
            found.append(digest)
            tell(1, 0, 0)
    with destination.atomic_writer(digests_name(plan)) as sink:
        sink.write(json.dumps(found).encode())


def _read(destination: Storage, plan: ShardPlan) -> Iterator[_Digest | None]:
    for digest in json.loads(destination.read(digests_name(plan))):
        yield None if digest is None else (digest[0], digest[1])
