"""Finds the known failure whose messages resemble an unknown one most.

Messages are compared by their words and pairs of words, weighted by how rare they are among the
examples of all signatures (TF-IDF with cosine similarity; Manning, Raghavan, Schütze: Introduction
to Information Retrieval, 2008, chapter 6). The three nearest examples vote.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from functools import cache

from sm_train.toolkit.diagnose.signatures import SignatureRole, signatures

MIN_SIMILARITY = 0.3
"""Sum of the similarities of the nearest three examples from which an answer is given. On the lines
of the held-out logs in tests/toolkit/diagnose/corpus that are no near copy of an example, three of
four such answers are right."""

_NEAREST = 3
_MIN_WORDS = 3
"""With fewer words, a message resembles any example that has one of them."""
_WORD = re.compile(r"[A-Za-z]{3,}")
# "DataLoader", "OutOfMemory"
_WORD_BOUNDARY = re.compile(r"(?<=[a-z])(?=[A-Z])")
_ENDING = re.compile(r"(?:ing|ed|es|s)$")
_MIN_STEM = 5
_NO_CAUSE: tuple[SignatureRole, ...] = ("echo", "warning")
_NEVER_GUESSED = ("stopped",)
"""Says that the program did not fail, for which a resemblance is no evidence."""

_Vector = Mapping[str, float]


def most_similar(text: str) -> tuple[str | None, float]:
    """Return the code of the cause whose examples resemble ``text`` most, and how much.

    The code is None if the nearest examples are no cause of a failure.
    """
    if len(_WORD.findall(text)) < _MIN_WORDS:
        return None, 0.0
    vector = _vector(_terms(text))
    similarities = [(_product(vector, example), code) for code, example in _examples()]
    votes: defaultdict[str, float] = defaultdict(float)
    for similarity, code in sorted(similarities, reverse=True)[:_NEAREST]:
        votes[code] += similarity
    code = max(votes, key=lambda one: votes[one])
    is_cause = votes[code] > 0 and signatures()[code].role not in _NO_CAUSE
    return (code if is_cause else None), votes[code]


@cache
def _examples() -> tuple[tuple[str, _Vector], ...]:
    """Return (code, vector) of all examples and titles."""
    return tuple((code, _vector(terms)) for code, terms in _documents())


def _documents() -> Iterator[tuple[str, list[str]]]:
    for signature in signatures().values():
        if signature.code in _NEVER_GUESSED:
            continue
        for text in (*signature.examples, signature.title):
            yield signature.code, _terms(text)


@cache
def _weights() -> tuple[_Vector, float]:
    """Return term → inverse document frequency, and the highest one."""
    documents = [set(terms) for _, terms in _documents()]
    counts = Counter(term for terms in documents for term in terms)
    rarest = math.log(len(documents) + 1)
    return {term: rarest - math.log(count) for term, count in counts.items()}, rarest


def _terms(text: str) -> list[str]:
    """Return the words of ``text`` without their endings, and all pairs of neighbors."""
    words = [word.lower() for word in _WORD.findall(_WORD_BOUNDARY.sub(" ", text))]
    stems = [_ENDING.sub("", word) if len(word) > _MIN_STEM else word for word in words]
    return [*stems, *map(" ".join, itertools.pairwise(stems))]


def _vector(terms: list[str]) -> _Vector:
    """Return term → weight with length 1; terms of no example count as the rarest."""
    weights, rarest = _weights()
    vector = {term: weights.get(term, rarest) for term in set(terms)}
    length = math.sqrt(sum(weight * weight for weight in vector.values()))
    return {term: weight / length for term, weight in vector.items()} if length else {}


def _product(one: _Vector, other: _Vector) -> float:
    return sum(weight * other.get(term, 0.0) for term, weight in one.items())
