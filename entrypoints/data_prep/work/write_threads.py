"""Calls a function that writes files in several threads; none is left behind by an interrupt."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from sm_train.entrypoints.base.signals import record_signals

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def write_in_threads(
    write: Callable[[_Item], _Result], items: Iterable[_Item], threads: int
) -> list[_Result]:
    """Call ``write`` with each item in ``threads`` threads; return the results in order.

    After an interrupt no further call begins, and those that have begun end first. A plain pool
    does not ensure that: KeyboardInterrupt while a thread starts leaves a thread that the pool does
    not know, and that writes on while the caller cleans up.

    Raises:
        KeyboardInterrupt: on a termination signal.
    """
    with record_signals() as raise_recorded:

        def call(item: _Item) -> _Result:
            raise_recorded()
            return write(item)

        with ThreadPoolExecutor(threads) as pool:
            return list(pool.map(call, items))
