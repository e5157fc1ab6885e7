"""Ranks exchange objects through a real TCPStore, without a backend."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed
from hypothesis import given, settings
from hypothesis import strategies as st
from sm_train.entrypoints.distributed import object_exchange
from sm_train.entrypoints.distributed.object_exchange import ObjectExchange
from sm_train.entrypoints.distributed.rendezvous import serve_store

from tests.support.deadline import DEADLINE

TCPStore: Any = torch.distributed.TCPStore


@contextmanager
def ranks(world_size: int, timeout: float = DEADLINE) -> Iterator[list[ObjectExchange]]:
    server, port = serve_store(0, timeout=DEADLINE)
    yield [
        ObjectExchange(
            TCPStore("127.0.0.1", port, None, False, timedelta(seconds=DEADLINE)),
            rank,
            world_size,
            timedelta(seconds=timeout),
        )
        for rank in range(world_size)
    ]
    del server


def on_all(exchanges: list[ObjectExchange], call: Callable[[ObjectExchange], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(exchanges)) as pool:
        return list(pool.map(call, exchanges))


@settings(max_examples=10)
@given(st.lists(st.binary(max_size=9) | st.none() | st.text(max_size=9), min_size=1, max_size=4))
def test_all_ranks_receive_all_values_in_rank_order(values: list[Any]) -> None:
    with ranks(len(values)) as exchanges:
        for _ in range(3):
            received = on_all(exchanges, lambda one: one.all_gather(values[one.rank]))
            assert received == [values] * len(values)


def test_large_values_are_split_into_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_exchange, "CHUNK_BYTES", 1000)
    values = [bytes(range(256)) * 40, torch.arange(5000).tolist()]
    with ranks(2) as exchanges:
        assert on_all(exchanges, lambda one: one.all_gather(values[one.rank])) == [values] * 2


def test_gather_returns_the_values_on_rank_0_only() -> None:
    with ranks(3) as exchanges:
        assert on_all(exchanges, lambda one: one.gather(one.rank)) == [[0, 1, 2], None, None]
        assert on_all(exchanges, lambda one: one.all_gather(one.rank)) == [[0, 1, 2]] * 3


def test_values_are_deleted_once_all_ranks_have_read_them() -> None:
    with ranks(2) as exchanges:
        store: Any = exchanges[0].store
        before = store.num_keys()
        counts = set()
        for _ in range(5):
            on_all(exchanges, lambda one: one.gather(one.rank))
            on_all(exchanges, lambda one: one.all_gather(one.rank))
            counts.add(store.num_keys() - before)
        assert counts == {4}, "only the keys of the last call may remain"


def test_absent_rank_is_named() -> None:
    absent = pytest.raises(TimeoutError, match="ranks 1, 2 did not take part")
    with ranks(3, timeout=0.2) as exchanges, absent:
        exchanges[0].all_gather("here")


def test_single_process_receives_its_own_value() -> None:
    assert object_exchange.all_gather(7) == [7]
    assert object_exchange.gather(7) == [7]
