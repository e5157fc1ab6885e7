"""Strategic merge of a user's patch into a pod, as ``kubectl patch`` does it.

Objects are merged, null deletes a key, and a list whose elements have a key of their own is merged
by it; any other list is replaced (Kubernetes documentation, "Update API Objects in Place Using
kubectl patch"; the keys are the ``patchMergeKey`` of the core API, kubernetes/api v0.34).
"""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches
from typing import Any

from sm_train.estimators.manifests.problem import ManifestError

_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "volumeMounts": "mountPath",
    "env": "name",
    "ports": "containerPort",
    "imagePullSecrets": "name",
    "hostAliases": "ip",
    "topologySpreadConstraints": "topologyKey",
}
"""List of a pod → the key that identifies its elements."""


def merged(document: dict[str, Any], patch: dict[str, Any]) -> dict[str, Any]:
    """Return ``document`` with ``patch``; neither is changed.

    Raises:
        ManifestError: an element of a list does not say which element it changes.
    """
    result = dict(document)
    for name, value in patch.items():
        before = result.get(name)
        if value is None:
            result.pop(name, None)
        elif isinstance(value, dict):
            result[name] = merged(before if isinstance(before, dict) else {}, value)
        elif isinstance(value, list) and isinstance(before, list) and name in _KEYS:
            result[name] = _merged_list(before, value, name)
        else:
            result[name] = value
    return result


def require_pod(pod: dict[str, Any]) -> None:
    """Refuse a pod template with fields that Kubernetes does not have, as its API server does.

    The typed models of Kubeflow's API package read it; a field that they do not know is lost.

    Raises:
        ManifestError: it names the field, or the value that is of another type.
    """
    # Half a second, for a run with a patch only.
    from kubeflow_trainer_api.models.io_k8s_api_core_v1_pod_template_spec import (
        IoK8sApiCoreV1PodTemplateSpec,
    )
    from pydantic import ValidationError

    try:
        read = IoK8sApiCoreV1PodTemplateSpec.from_dict(pod)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"])) or error.title.rpartition("V1")[2]
        raise ManifestError(f"kubernetes.pod_patch: {place}: {first['msg'].lower()}") from None
    known = {} if read is None else read.to_dict()
    for path, siblings in _lost(pod, known, ()):
        close = get_close_matches(path[-1], siblings, n=1, cutoff=0.5)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ManifestError(
            f"kubernetes.pod_patch: {'.'.join(path)}: Kubernetes has no such field{hint}"
        )


def _lost(
    given: Any, known: Any, path: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], list[str]]]:
    """Yield the path of each key of ``given`` that ``known`` lacks, and the names it may mean."""
    if isinstance(given, dict) and isinstance(known, dict):
        for name, value in given.items():
            if name not in known and value not in (None, {}, []):
                yield (*path, name), _fields_of(path)
            elif name in known:
                yield from _lost(value, known[name], (*path, name))
    elif isinstance(given, list) and isinstance(known, list):
        for position, (element, read) in enumerate(zip(given, known, strict=False)):
            yield from _lost(element, read, (*path[:-1], f"{path[-1]}[{position}]"))


def _fields_of(path: tuple[str, ...]) -> list[str]:
    """Return the fields of the pod's or a container's specification, for suggestions."""
    from kubeflow_trainer_api.models.io_k8s_api_core_v1_container import IoK8sApiCoreV1Container
    from kubeflow_trainer_api.models.io_k8s_api_core_v1_pod_spec import IoK8sApiCoreV1PodSpec

    is_container = bool(path) and path[-1].startswith(("containers[", "initContainers["))
    model = IoK8sApiCoreV1Container if is_container else IoK8sApiCoreV1PodSpec
    return [field.alias or name for name, field in model.model_fields.items()]


def _merged_list(before: list[Any], patch: list[Any], name: str) -> list[Any]:
    """Merge elements of the list ``name``; new ones follow. ``$patch: delete`` removes one."""
    key = _KEYS[name]
    elements = {element.get(key): element for element in before}
    for element in patch:
        if not isinstance(element, dict) or key not in element:
            raise ManifestError(
                f"kubernetes.pod_patch: an element of {name} has no {key}; add the {key} of the "
                "element that it changes or adds"
            )
        if element.get("$patch") == "delete":
            elements.pop(element[key], None)
        else:
            elements[element[key]] = merged(elements.get(element[key], {}), element)
    return list(elements.values())
