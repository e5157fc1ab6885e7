"""Find credentials that must not leave the laptop: in the run file and in user code.

A match names the kind and the location and never contains the secret. The patterns are those that
the services publish, or that gitleaks uses (github.com/gitleaks/gitleaks, config/gitleaks.toml,
2026). A secret without a recognizable format, such as a password, cannot be found this way.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

_PATTERNS = {
    # AKIA: a user's long-term key. ASIA: a temporary key of a role session.
    "an AWS access key": r"\b(?:AKIA|ASIA)[A-Z2-7]{16}\b",
    # 40 base64 characters alone are too common: the name before them is required.
    "an AWS secret key": r"(?i:aws_?secret_?(?:access_?)?key)\W{1,5}[A-Za-z0-9/+]{40}\b",
    "a private key": r"-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----",
    "a Slack webhook": r"hooks\.slack(?:-gov)?\.com/[a-z]+/[A-Za-z0-9/_-]{20,}",
    "a Slack token": r"\bxox[abeoprs]-[A-Za-z0-9-]{10,}|\bxapp-[A-Za-z0-9-]{20,}",
    "a GitHub token": r"\bgh[opsur]_[A-Za-z0-9]{36}|\bgithub_pat_[A-Za-z0-9_]{22,}",
    "a GitLab token": r"\bglpat-[A-Za-z0-9_-]{20}",
    "a Hugging Face token": r"\b(?:hf|api_org)_[A-Za-z]{34}\b",
    "an OpenAI or Anthropic key": r"\bsk-(?:ant-|proj-)?[A-Za-z0-9_-]{32,}",
    "a Google API key": r"\bAIza[A-Za-z0-9_-]{35}",
    # user:password@ in a URL.
    "a password in an address": r"\b[a-z][a-z0-9+.-]*://[^\s/:@'\"]+:[^\s/:@'\"]+@",
}
# One regular expression with a group per kind scans each file once.
_GROUPS = (f"(?P<k{index}>{pattern})" for index, pattern in enumerate(_PATTERNS.values()))
_ANY = re.compile("|".join(_GROUPS).encode())


@dataclass(frozen=True)
class FoundSecret:
    """Something that looks like a credential; ``line`` counts from 1."""

    kind: str
    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: looks like {self.kind}"


def find_secret(text: str) -> str | None:
    """Return the kind of the first credential in ``text``."""
    return next((kind for kind, _ in _matches(text.encode())), None)


def find_secrets(files: Mapping[str, bytes]) -> Iterator[FoundSecret]:
    """Yield every credential in ``files``, in their order."""
    for name, content in files.items():
        for kind, offset in _matches(content):
            yield FoundSecret(kind, name, content.count(b"\n", 0, offset) + 1)


def _matches(content: bytes) -> Iterator[tuple[str, int]]:
    """Yield the kind of each match and its offset in bytes."""
    kinds = list(_PATTERNS)
    for match in _ANY.finditer(content):
        assert match.lastgroup is not None
        yield kinds[int(match.lastgroup[1:])], match.start()
