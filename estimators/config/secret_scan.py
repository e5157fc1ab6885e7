"""Finds keys that must not leave the laptop: in a run file's values and in the user's own code.

A finding names the kind and the place and never holds the secret. The shapes are those that the
services publish, or that gitleaks (github.com/gitleaks/gitleaks, config/gitleaks.toml, 2026) looks
for; a secret without a shape of its own, such as a password, cannot be found this way.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

_KINDS = {
    "an AWS access key": r"\b(?:AKIA|ASIA)[A-Z2-7]{16}\b",
    "an AWS secret key": r"(?i:aws_?secret_?(?:access_?)?key)\W{1,5}[A-Za-z0-9/+]{40}\b",
    "a private key": r"-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----",
    "a Slack webhook": r"hooks\.slack(?:-gov)?\.com/[a-z]+/[A-Za-z0-9/_-]{20,}",
    "a Slack token": r"\bxox[abeoprs]-[A-Za-z0-9-]{10,}|\bxapp-[A-Za-z0-9-]{20,}",
    "a GitHub token": r"\bgh[opsur]_[A-Za-z0-9]{36}|\bgithub_pat_[A-Za-z0-9_]{22,}",
    "a GitLab token": r"\bglpat-[A-Za-z0-9_-]{20}",
    "a Hugging Face token": r"\b(?:hf|api_org)_[A-Za-z]{34}\b",
    "an OpenAI or Anthropic key": r"\bsk-(?:ant-|proj-)?[A-Za-z0-9_-]{32,}",
    "a Google API key": r"\bAIza[A-Za-z0-9_-]{35}",
    "a password in an address": r"\b[a-z][a-z0-9+.-]*://[^\s/:@'\"]+:[^\s/:@'\"]+@",
}
_ANY = re.compile(
    "|".join(f"(?P<k{index}>{shape})" for index, shape in enumerate(_KINDS.values())).encode()
)


@dataclass(frozen=True)
class FoundSecret:
    """What looks like a key, where it stands (lines count from 1)."""

    kind: str
    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: looks like {self.kind}"


def secret_in(text: str) -> str | None:
    """The kind of the first key in ``text``."""
    return next((kind for kind, _ in _found(text.encode())), None)


def secrets_in(files: Mapping[str, bytes]) -> Iterator[FoundSecret]:
    """Every key in ``files``, in their order."""
    for name, content in files.items():
        for kind, offset in _found(content):
            yield FoundSecret(kind, name, content.count(b"\n", 0, offset) + 1)


def _found(content: bytes) -> Iterator[tuple[str, int]]:
    kinds = list(_KINDS)
    for match in _ANY.finditer(content):
        assert match.lastgroup is not None
        yield kinds[int(match.lastgroup[1:])], match.start()
