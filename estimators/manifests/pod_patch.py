"""Strategic merge of a user's patch into a pod, as ``kubectl patch`` does it.

Objects are merged, null deletes a key, and a list whose elements have a key of their own is merged
by it; any other list is replaced (Kubernetes documentation, "Update API Objects in Place Using
kubectl patch"; the keys are the ``patchMergeKey`` of the core API, kubernetes/api v0.34).
"""

from __future__ import annotations

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
