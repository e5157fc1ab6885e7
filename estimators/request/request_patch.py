"""Fields that a request has besides those that other keys of the run file set."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from sm_train.estimators.config.cluster import ClusterSection

_Request = TypeVar("_Request", bound=Mapping[str, Any])


class RequestPatchError(ValueError):
    """``cluster.request_patch`` changes what another key of the run file sets."""


def additions(cluster: ClusterSection) -> dict[str, Any]:
    """Return the fields that are added to every request: those of ``cluster.request_patch``, and
    SageMaker's check of the instances before the job (API reference, InfraCheckConfig).
    """
    return {"InfraCheckConfig": {"EnableInfraCheck": True}} | cluster.request_patch


def with_additions(request: _Request, added: Mapping[str, Any]) -> _Request:
    """Return the request with fields added at any depth.

    Raises:
        RequestPatchError: it has one of them already.
    """
    return _merged(request, added, "")  # type: ignore[return-value]


def without_additions(request: _Request, added: Mapping[str, Any]) -> _Request:
    """Return the request as it was before :func:`with_additions`."""
    return _reduced(request, added)  # type: ignore[return-value]


def _merged(request: Mapping[str, Any], added: Mapping[str, Any], path: str) -> dict[str, Any]:
    result = dict(request)
    for name, value in added.items():
        before = result.get(name)
        if isinstance(before, Mapping) and isinstance(value, Mapping):
            result[name] = _merged(before, value, f"{path}{name}.")
        elif name in result:
            raise RequestPatchError(
                f"cluster.request_patch: {path}{name} is in the request already; the patch only "
                "adds fields"
            )
        else:
            result[name] = value
    return result


def _reduced(request: Mapping[str, Any], added: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(request)
    for name, value in added.items():
        left = result.pop(name, None)
        if isinstance(left, Mapping) and isinstance(value, Mapping):
            rest = _reduced(left, value)
            result |= {name: rest} if rest else {}
    return result
