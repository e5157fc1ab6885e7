"""Ranks exchange objects through a real TCPStore, without a backend."""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed
from hypothesis import given, settings
from hypothesis import strategies as st
from sm_train.entrypoints.base.digests import machine_key, seal
from sm_train.entrypoints.base.error import Error
from sm_train.entrypoints.distributed import messages, object_exchange
from sm_train.entrypoints.distributed.messages import ForgedMessageError, Messages, MissingNodeError
from sm_train.entrypoints.distributed.object_exchange import ObjectExchange
from sm_train.entrypoints.distributed.rendezvous import serve_store

from tests.support.deadline import DEADLINE

TCPStore: Any = torch.distributed.TCPStore
KEY = b"the job's key"


@contextmanager
def ranks(world_size: int, timeout: float = DEADLINE) -> Iterator[list[ObjectExchange]]:
    server, port = serve_store(0, timeout=DEADLINE)
    yield [
        ObjectExchange(
            Messages(TCPStore("127.0.0.1", port, None, False, timedelta(seconds=DEADLINE)), KEY),
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
            received = on_all(
                exchanges, lambda exchange: exchange.all_gather(values[exchange.rank])
            )
            assert received == [values] * len(values)


def test_large_values_are_split_into_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "CHUNK_BYTES", 1000)
    values = [bytes(range(256)) * 40, torch.arange(5000).tolist()]
    with ranks(2) as exchanges:
        assert (
            on_all(exchanges, lambda exchange: exchange.all_gather(values[exchange.rank]))
            == [values] * 2
        )


def test_gather_returns_the_values_on_rank_0_only() -> None:
    with ranks(3) as exchanges:
        assert on_all(exchanges, lambda exchange: exchange.gather(exchange.rank)) == [
            [0, 1, 2],
            None,
            None,
        ]
        assert (
            on_all(exchanges, lambda exchange: exchange.all_gather(exchange.rank))
            == [[0, 1, 2]] * 3
        )


def test_values_are_deleted_once_all_ranks_have_read_them() -> None:
    with ranks(2) as exchanges:
        store: Any = exchanges[0].messages.store
        before = store.num_keys()
        counts = set()
        for _ in range(5):
            on_all(exchanges, lambda exchange: exchange.gather(exchange.rank))
            on_all(exchanges, lambda exchange: exchange.all_gather(exchange.rank))
            counts.add(store.num_keys() - before)
        assert counts == {2}, "only the messages of the last call may remain"


def test_absent_rank_is_named() -> None:
    absent = pytest.raises(MissingNodeError, match="rank 1, rank 2 did not take part")
    with ranks(3, timeout=0.2) as exchanges, absent:
        exchanges[0].all_gather("here")


class Payload:
    """Runs code when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._file,)


@pytest.mark.parametrize("name", ["objects/1/1", "objects/1/1/0"])
@pytest.mark.parametrize("attack", ["forged", "replayed", "cut"])
def test_value_of_another_host_is_refused_before_it_is_unpickled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, attack: str
) -> None:
    """A third connection to the rendezvous's port replaces what rank 1 has written."""
    monkeypatch.setattr(messages, "CHUNK_BYTES", 8)
    with ranks(2) as exchanges:
        intruder: Any = exchanges[1].messages.store
        exchanges[1]._publish("honest")
        payload = zlib.compress(pickle.dumps(Payload(tmp_path / "executed")))
        values = {
            "forged": payload,
            "replayed": seal(payload, KEY, "objects/2/1/0"),
            "cut": bytes(intruder.get(name))[:-1],
        }
        intruder.set(name, values[attack])
        exchanges[0]._publish("own")
        with pytest.raises(ForgedMessageError, match=r"was not written by a process of this job"):
            exchanges[0]._read("objects/1")
    assert not (tmp_path / "executed").exists()


def test_processes_outside_of_a_job_share_a_key_that_others_cannot_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with ThreadPoolExecutor(8) as threads:
        keys = {future.result() for future in [threads.submit(machine_key) for _ in range(200)]}
    assert keys == {machine_key()}
    assert [path.suffix for path in tmp_path.iterdir()] == [".key"]
    [file] = tmp_path.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    file.chmod(0o644)
    with pytest.raises(Error, match="others can read it; remove it"):
        machine_key()


def test_single_process_receives_its_own_value() -> None:
    assert object_exchange.all_gather(7) == [7]
    assert object_exchange.gather(7) == [7]
