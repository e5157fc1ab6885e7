"""Divides work among several nodes, so that none waits for a slow or lost one.

A node takes a lease for each part that it works on. Leases only avoid double work. The result does
not depend on them, because two nodes that build the same shard write the same bytes. So a node
takes over a part

- whose lease has expired: its node is lost, or was paused;
- that was not completed any further for :data:`SLOW_SECONDS`, once it has nothing else to do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from itertools import chain, islice
from typing import Generic, TypeVar

from sm_train.entrypoints.data_prep.work.worker_pool import WorkProgress
from sm_train.entrypoints.storage.lease import Holder, Lease, LeaseHeldError, Renewal
from sm_train.entrypoints.storage.lease_files import LeaseFiles
from sm_train.entrypoints.storage.storage import Storage

STATE_FOLDER = ".packing"
"""Folder in the destination with what unfinished work is resumed from."""

LEASE_NAME = f"{STATE_FOLDER}/lease.json"
"""Lease of the whole destination, to which one command at a time writes."""

LEASES_FOLDER = f"{STATE_FOLDER}/leases"
"""Leases of the parts that nodes work on."""

PLAN_NAME = f"{STATE_FOLDER}/plan.json"
"""Describes the unfinished work in the destination."""

ENDED_NAME = f"{STATE_FOLDER}/ended"
"""Marks work whose result is written and whose other files are being removed."""

SLOW_SECONDS = 900.0
"""Time without a finished item after which an idle node takes over a part: several times what a
shard of 4 GB takes."""

POLL_SECONDS = 5.0
"""Polling interval of a node that waits for others."""

_PARTS_PER_NODE = 8
"""Parts for each node: the last ones to finish are small."""

_MAX_PART_ITEMS = 64

_Item = TypeVar("_Item")


@dataclass(frozen=True)
class Part(Generic[_Item]):
    """Items that one node works on, and the name of their lease."""

    name: str
    items: Sequence[_Item]


def in_groups(items: Iterable[_Item], size: int) -> Iterator[list[_Item]]:
    """Yield the items in lists of ``size``; the last one may be shorter."""
    remaining = iter(items)
    while group := list(islice(remaining, size)):
        yield group


def split_parts(name: str, items: Sequence[_Item], num_nodes: int) -> list[Part[_Item]]:
    """Return ranges of items as parts whose leases are named after ``name``."""
    size = max(1, min(_MAX_PART_ITEMS, len(items) // (num_nodes * _PARTS_PER_NODE)))
    return [
        Part(f"{name}-{first:06d}", items[first : first + size])
        for first in range(0, len(items), size)
    ]


@dataclass(frozen=True)
class Stage(Generic[_Item]):
    """A part of the work that must be complete before the next one starts.

    ``unfinished`` returns those of some items whose results are not stored. ``run`` takes items
    when it can start them, and yields the progress. Both may be called again.
    """

    parts: Sequence[Part[_Item]]
    unfinished: Callable[[Iterable[_Item]], list[_Item]]
    run: Callable[[Iterable[_Item]], Generator[WorkProgress]]

    @property
    def items(self) -> Iterator[_Item]:
        return chain.from_iterable(part.items for part in self.parts)


class WorkEndedError(Exception):
    """Another node has written the result of the work."""


class WorkLeases:
    """The leases of one node in ``files``; None gives it every part, as for a single node."""

    def __init__(self, files: LeaseFiles | None) -> None:
        self._files = files
        self._holder: Holder | None = None
        self._renewal = Renewal()

    def renewed(self) -> AbstractContextManager[object]:
        """Renew the leases in the background until the context exits."""
        return nullcontext() if self._files is None else self._renewal

    def acquire(self, part: str, *, by_force: bool = False) -> bool:
        """Take the lease of a part, unless another node holds it and ``by_force`` is not set."""
        if self._files is None or part in self._renewal:
            return True
        self._holder = self._holder or Holder.of_this_process()
        lease = Lease(self._files, f"{LEASES_FOLDER}/{part}.json", self._holder)
        try:
            lease.acquire(by_force=by_force)
        except LeaseHeldError:
            return False
        self._renewal.add(part, lease)
        return True

    def release_all(self) -> None:
        """Stop renewing all leases; what they protected is finished."""
        self._renewal.clear()


class SharedWork:
    """The work of one of several nodes that write to the same destination.

    ``is_shared`` is false for the only process that writes there, which needs no leases.
    """

    def __init__(
        self, destination: Storage, *, node_rank: int = 0, num_nodes: int = 1, is_shared: bool
    ) -> None:
        self._destination = destination
        self.num_nodes, self._node_rank = num_nodes, node_rank
        self._is_shared = is_shared
        self._leases = WorkLeases(destination.lease_files if is_shared else None)

    def renewed(self) -> AbstractContextManager[object]:
        """Keep the leases of this node until the context exits."""
        return self._leases.renewed()

    def complete(self, stage: Stage[_Item]) -> Iterator[WorkProgress]:
        """Run a stage together with the other nodes; yield this node's progress until it is done.

        Raises:
            WorkEndedError: another node has written the result meanwhile.
        """
        slow = _SlowParts(stage)
        while True:
            own = self._own_items(stage)
            if (first := next(own, None)) is not None:
                yield from self._run(stage, first, own)
            if not self._is_shared:
                return
            if not stage.unfinished(stage.items):
                # The files of work that has ended are removed: look for its end after them.
                self.raise_if_ended()
                self._leases.release_all()
                return
            self.raise_if_ended()
            part = slow.next()
            if part is not None and self._leases.acquire(part.name, by_force=True):
                yield from self._run(stage, part.items[0], iter(part.items[1:]))
            time.sleep(POLL_SECONDS)

    def _own_items(self, stage: Stage[_Item]) -> Iterator[_Item]:
        """Yield unfinished items of parts whose leases are taken one after another.

        Each node starts with another part, so that they rarely try the same one.
        """
        num_parts = len(stage.parts)
        start = self._node_rank * num_parts // self.num_nodes
        for offset in range(num_parts):
            part = stage.parts[(start + offset) % num_parts]
            if stage.unfinished(part.items) and self._leases.acquire(part.name):
                yield from stage.unfinished(part.items)

    def _run(
        self, stage: Stage[_Item], first: _Item, own: Iterator[_Item]
    ) -> Iterator[WorkProgress]:
        """Run items of this node; stop early if the other nodes have finished them."""
        is_waiting = False

        def items() -> Iterator[_Item]:
            nonlocal is_waiting
            yield first
            yield from own
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
        """Raise an error if another node has written the result.

        Raises:
            WorkEndedError: it has.
        """
        if self.has_ended():
            raise WorkEndedError

    def has_ended(self) -> bool:
        """Return whether another node has written the result.

        The mark is stored before any other file is removed, and removed after all of them.
        """
        return (
            self._destination.size(ENDED_NAME) is not None
            or self._destination.size(PLAN_NAME) is None
        )

    def acquire(self, part: str) -> bool:
        """Take the lease of a part, unless another node holds it."""
        return self._leases.acquire(part)


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
