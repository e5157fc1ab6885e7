"""Claims parts of a pack for one of several nodes, so that none waits for a slow or lost one.

A node claims a part by creating an object with a conditional write, and renews it while it runs.
Claims only avoid double work. The result does not depend on them, because two nodes that build the
same shard write the same bytes. So a node takes over a part

- whose claim was not renewed for :data:`EXPIRES_SECONDS`: its node is lost, or was paused;
- that was not completed any further for :data:`SLOW_SECONDS`, once it has nothing else to do.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from typing import Generic, TypeVar

from sm_train.entrypoints.packing.claim import PackClaim, put_claim, read_claim
from sm_train.entrypoints.packing.shard_builder import PACK_STATE
from sm_train.entrypoints.packing.storage import S3Prefix, Storage
from sm_train.entrypoints.packing.worker_pool import PackProgress

CLAIMS_FOLDER = f"{PACK_STATE}/claims"

PLAN_NAME = f"{PACK_STATE}/plan.json"

ENDED_NAME = f"{PACK_STATE}/ended"
"""Marks a pack whose index is written and whose other files are being removed."""

RENEW_SECONDS = 20.0

EXPIRES_SECONDS = 120.0
"""Age at which a claim that was not renewed is taken over: five renewals may fail."""

SLOW_SECONDS = 900.0
"""Time without a finished item after which an idle node takes over a part: several times what a
shard of 4 GB takes."""

POLL_SECONDS = 5.0
"""Polling interval of a node that waits for others."""

_Item = TypeVar("_Item")


@dataclass(frozen=True)
class Part(Generic[_Item]):
    """Items that one node works on, and the name of their claim."""

    name: str
    items: Sequence[_Item]


@dataclass(frozen=True)
class Stage(Generic[_Item]):
    """A part of the work that must be complete before the next one starts.

    ``unfinished`` returns those of some items whose results are not stored. ``run`` takes items
    when it can start them, and yields the progress. Both may be called again.
    """

    parts: Sequence[Part[_Item]]
    unfinished: Callable[[Iterable[_Item]], list[_Item]]
    run: Callable[[Iterable[_Item]], Generator[PackProgress]]

    @property
    def items(self) -> Iterator[_Item]:
        return chain.from_iterable(part.items for part in self.parts)


class PackEndedError(Exception):
    """Another node has written the index of the pack."""


class WorkClaims:
    """The claims of one node below an S3 prefix; None claims everything, for a single node."""

    def __init__(self, prefix: S3Prefix | None) -> None:
        self._prefix = prefix
        self._held: dict[str, tuple[PackClaim, str]] = {}
        self._lock = threading.Lock()

    @contextmanager
    def renewed(self) -> Iterator[None]:
        """Renew the held claims in the background until the context exits."""
        if self._prefix is None:  # botocore may not be installed
            yield
            return
        stop = threading.Event()
        thread = threading.Thread(target=self._renew, args=[stop], daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def _renew(self, stop: threading.Event) -> None:
        from botocore.exceptions import BotoCoreError, ClientError

        while not stop.wait(RENEW_SECONDS):
            with self._lock:
                held = dict(self._held)
            for name, (claim, etag) in held.items():
                # After a failed request the claim is still valid, and the next one renews it.
                with suppress(BotoCoreError, ClientError):
                    self._store(name, claim, etag)

    def _store(self, name: str, claim: PackClaim, etag: str | None) -> bool:
        """Write a claim if it is as expected; otherwise another node holds it."""
        assert self._prefix is not None
        stored = put_claim(self._prefix, name, claim, etag)
        with self._lock:
            if stored is None:
                self._held.pop(name, None)
            else:
                self._held[name] = claim, stored
        return stored is not None

    def acquire(self, part: str, *, by_force: bool = False) -> bool:
        """Claim a part unless another node holds it; ``by_force`` also takes over a held claim."""
        if self._prefix is None:
            return True
        name, claim = f"{CLAIMS_FOLDER}/{part}.json", PackClaim.of_this_process()
        with self._lock:
            if name in self._held:
                return True
        found = read_claim(self._prefix, name)
        if found is None:
            return self._store(name, claim, None)
        _, age, etag = found
        return (by_force or age >= EXPIRES_SECONDS) and self._store(name, claim, etag)

    def release_all(self) -> None:
        """Stop renewing all claims; what was claimed is finished."""
        with self._lock:
            self._held.clear()


class SharedWork:
    """The work of one of several nodes that pack to the same destination.

    ``is_shared`` is false for the only process that writes there, which needs no claims.
    """

    def __init__(
        self, destination: Storage, *, node_rank: int = 0, num_nodes: int = 1, is_shared: bool
    ) -> None:
        self._destination = destination
        self.num_nodes, self._node_rank = num_nodes, node_rank
        # Only S3 has conditional writes, and only there several nodes write.
        prefix = destination if is_shared and isinstance(destination, S3Prefix) else None
        self._is_shared, self._claims = prefix is not None, WorkClaims(prefix)

    def renewed(self) -> AbstractContextManager[None]:
        """Keep the claims of this node until the context exits."""
        return self._claims.renewed()

    def complete(self, stage: Stage[_Item]) -> Iterator[PackProgress]:
        """Run a stage together with the other nodes; yield this node's progress until it is done.

        Raises:
            PackEndedError: another node has written the index meanwhile.
        """
        slow = _SlowParts(stage)
        while True:
            claimed = self._claim_items(stage)
            if (first := next(claimed, None)) is not None:
                yield from self._run(stage, first, claimed)
            if not self._is_shared:
                return
            if not stage.unfinished(stage.items):
                # The files of a pack that has ended are removed: look for its end after them.
                self.raise_if_ended()
                self._claims.release_all()
                return
            self.raise_if_ended()
            part = slow.next()
            if part is not None and self._claims.acquire(part.name, by_force=True):
                yield from self._run(stage, part.items[0], iter(part.items[1:]))
            time.sleep(POLL_SECONDS)

    def _claim_items(self, stage: Stage[_Item]) -> Iterator[_Item]:
        """Yield unfinished items of parts that are claimed one after another.

        Each node starts with another part, so that they rarely try the same one.
        """
        num_parts = len(stage.parts)
        start = self._node_rank * num_parts // self.num_nodes
        for offset in range(num_parts):
            part = stage.parts[(start + offset) % num_parts]
            if stage.unfinished(part.items) and self._claims.acquire(part.name):
                yield from stage.unfinished(part.items)

    def _run(
        self, stage: Stage[_Item], first: _Item, claimed: Iterator[_Item]
    ) -> Iterator[PackProgress]:
        """Run claimed items; stop early if the other nodes have finished them."""
        is_waiting = False

        def items() -> Iterator[_Item]:
            nonlocal is_waiting
            yield first
            yield from claimed
            is_waiting = True

        looked = time.monotonic()
        with closing(stage.run(items())) as progress:
            for step in progress:
                yield step
                if is_waiting and self._is_shared and time.monotonic() - looked > POLL_SECONDS:
                    looked = time.monotonic()
                    if not stage.unfinished(stage.items) or self.has_ended():
                        return

    def raise_if_ended(self) -> None:
        """Raise an error if another node has written the index.

        Raises:
            PackEndedError: it has.
        """
        if self.has_ended():
            raise PackEndedError

    def has_ended(self) -> bool:
        """Return whether another node has written the index.

        The mark is stored before any other file is removed, and removed after all of them.
        """
        return (
            self._destination.size(ENDED_NAME) is not None
            or self._destination.size(PLAN_NAME) is None
        )

    def acquire(self, part: str) -> bool:
        """Claim a part unless another node holds it."""
        return self._claims.acquire(part)


class _SlowParts(Generic[_Item]):
    """Notices parts of a stage that are not completed any further."""

    def __init__(self, stage: Stage[_Item]) -> None:
        self._stage = stage
        self._seen: dict[str, tuple[int, float]] = {}

    def next(self) -> Part[_Item] | None:
        """Return a part of which no item was finished for :data:`SLOW_SECONDS`."""
        now = time.monotonic()
        for part in self._stage.parts:
            if unfinished := self._stage.unfinished(part.items):
                count, since = self._seen.get(part.name, (0, now))
                if count != len(unfinished):
                    self._seen[part.name] = len(unfinished), now
                elif now - since >= SLOW_SECONDS:
                    self._seen[part.name] = len(unfinished), now
                    return Part(part.name, unfinished)
        return None
