"""The rule by which every watcher stops a run at its budget: a laptop, a function, and a cluster's.

Standard library only.
"""

from __future__ import annotations


def enforced_usd(usd: float, on_exceed: str) -> float | None:
    """Return the dollars at which a run is stopped; None if its budget only warns."""
    return usd if on_exceed == "stop" else None


def is_spent(enforced: float | None, spent_usd: float) -> bool:
    """Return whether a run has to be stopped.

    ``spent_usd`` is what counts: the most that jobs with a known price can have cost so far.
    """
    return enforced is not None and spent_usd >= enforced
