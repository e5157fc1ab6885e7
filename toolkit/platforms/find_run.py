"""Finds the run that a user names, wherever it is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sm_train.toolkit.errors import UserError
from sm_train.toolkit.jobs.local_folder import DEFAULT_FOLDER
from sm_train.toolkit.platforms.adapters import NoRunError, adapters, claim
from sm_train.toolkit.platforms.parse_target import run_target
from sm_train.toolkit.platforms.placed_run import PlacedRun
from sm_train.toolkit.platforms.target import Kind, Target


def find_run(text: str, options: dict[str, Any]) -> PlacedRun:
    """Return the run that a user names; one with jobs on several platforms where the newest is.

    ``options`` are the global ones (:class:`~sm_train.toolkit.platforms.adapters.Adapter`).

    Raises:
        UserError: there is no such run, or a platform returns an error.
    """
    target = run_target(text)
    with local_run_hint(target):
        return _find(target, options)


def _find(target: Target, options: dict[str, Any]) -> PlacedRun:
    found: PlacedRun | None = None
    problem: UserError | None = None
    for adapter in adapters():
        try:
            run = adapter.find(target, options)
        except NoRunError as error:
            problem = error
        except UserError:
            if found is None:
                raise
        else:
            found = _newer(found, run)
            if found is not None and found.is_only_place:
                return found
    for adapter in adapters():
        found = _newer(found, adapter.find_related(target, options, found))
    if found is None:
        raise problem or UserError(f"{target.text}: holds no run; name a run file, a run or a job")
    return found


@contextmanager
def local_run_hint(target: Target) -> Iterator[None]:
    """Add the path of the run on this machine that has this name, if there is one, to an error."""
    try:
        yield
    except UserError as error:
        here = claim(DEFAULT_FOLDER / target.text) if target.kind is Kind.NAME else None
        if here is None:
            raise
        raise UserError(f"{error}; the run on this machine is {here}", error.exit_code) from None


def _newer(found: PlacedRun | None, other: PlacedRun | None) -> PlacedRun | None:
    """Return where the newest job is; an equal claim is that of the platform asked first."""
    if found is None or other is None:
        return other if found is None else found
    starts = [run.latest_start() for run in (found, other)]
    return other if starts[1] is not None and (starts[0] or 0.0) < starts[1] else found
