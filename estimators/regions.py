"""AWS's regions, so that a mistyped one is refused offline and without importing botocore."""

from __future__ import annotations

from functools import cache

REGIONS = tuple(
    """
    us-east-1 us-east-2 us-west-1 us-west-2 af-south-1 ap-east-1 ap-east-2 ap-northeast-1
    ap-northeast-2 ap-northeast-3 ap-south-1 ap-south-2 ap-southeast-1 ap-southeast-2 ap-southeast-3
    ap-southeast-4 ap-southeast-5 ap-southeast-6 ap-southeast-7 ca-central-1 ca-west-1 eu-central-1
    eu-central-2 eu-north-1 eu-south-1 eu-south-2 eu-west-1 eu-west-2 eu-west-3 il-central-1
    me-central-1 me-south-1 mx-central-1 sa-east-1 cn-north-1 cn-northwest-1 us-gov-east-1
    us-gov-west-1 us-iso-east-1 us-isob-east-1 eu-isoe-west-1 us-isof-east-1 us-isof-south-1
    eusc-de-east-1
    """.split()
)
"""Regions with SageMaker in all partitions (botocore 1.44.5, ``endpoints.json``, 2026-11)."""

DEFAULT_REGION = "us-east-1"
"""Region of the prices if none is given."""

_MIN_SIMILARITY = 0.75
_SAME = 0.03
"""Suggestions whose similarity differs by less are shown together."""


def region_problem(name: str) -> str | None:
    """Return why ``name`` is not a region, with the nearest ones; None if it is one."""
    if name in REGIONS or name in _installed_regions():
        return None
    near = _nearest(name)
    hint = f"did you mean {' or '.join(near)}?" if near else "write one such as us-east-1"
    return f"is not an AWS region; {hint}"


def _nearest(name: str) -> list[str]:
    from difflib import SequenceMatcher

    scores = {region: SequenceMatcher(None, name.lower(), region).ratio() for region in REGIONS}
    best = max(scores.values())
    if best < _MIN_SIMILARITY:
        return []
    return [region for region, score in scores.items() if score > best - _SAME][:3]


@cache
def _installed_regions() -> set[str]:
    """Return the regions that the installed botocore knows: it may be newer than the table."""
    try:
        import botocore.session
    except ModuleNotFoundError:  # without [aws]
        return set()
    session = botocore.session.Session()
    partitions = session.get_available_partitions()
    return {
        region
        for partition in partitions
        for region in session.get_available_regions("sagemaker", partition)
    }
