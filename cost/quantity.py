"""Numbers that carry their derivation, so that no formula of an estimate is written twice."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import reduce
from itertools import chain, zip_longest
from typing import Any

_SUM, _PRODUCT = 1, 2


@dataclass(slots=True, eq=False)
class Quantity:
    """A number, how to show it, and what it was computed from.

    ``shown`` formats the value inside formulas; ``unit`` follows it where it stands alone.
    ``parts`` are the operands with the text around them. None is unknown, and so is everything
    that is computed from it. Amounts of money are Decimals, all other values int or float.
    """

    value: Any
    name: str = ""
    shown: str = "{:,.10g}"
    unit: str = ""
    source: str = "derived"
    parts: tuple[Quantity | str, ...] = ()
    binds: int = _PRODUCT

    def named(self, name: str, shown: str, unit: str = "", source: str = "derived") -> Quantity:
        """Return the same number under a name that stands for it in other formulas."""
        return Quantity(self.value, name, shown, unit, source, self.parts, self.binds)

    def exact(self) -> Quantity:
        """Return the same number as a Decimal, to multiply it with money."""
        return self if self.value is None else replace(self, value=Decimal(self.value))

    def __mul__(self, other: Quantity) -> Quantity:
        return _combine(operator.mul, self, " × ", other, _PRODUCT)

    def __truediv__(self, other: Quantity) -> Quantity:
        return _combine(operator.truediv, self, " ÷ ", other, _PRODUCT)

    def __add__(self, other: Quantity) -> Quantity:
        return _combine(operator.add, self, " + ", other, _SUM)

    def __sub__(self, other: Quantity) -> Quantity:
        return _combine(operator.sub, self, " − ", other, _SUM)

    @property
    def number(self) -> float | None:
        """The value of what is not money."""
        number: float | None = self.value
        return number

    @property
    def usd(self) -> Decimal | None:
        """The value of an amount of money."""
        amount: Decimal | None = self.value
        return amount

    @property
    def text(self) -> str:
        """The value with its unit."""
        return self._number() + self.unit

    @property
    def formula(self) -> str:
        """The derivation with the operands' names; the own name if there is none."""
        return self._derivation(lambda operand: operand.name) or self.name

    @property
    def figures(self) -> str:
        """The derivation with the operands' values."""
        return self._derivation(lambda operand: operand._number()) or self._number()

    def _number(self) -> str:
        return "unknown" if self.value is None else self.shown.format(self.value)

    def _derivation(self, show: Callable[[Quantity], str]) -> str:
        text = ""
        for part in self.parts:
            if isinstance(part, str):
                text += part
            elif part.name or not part.parts:
                text += show(part)
            else:
                # a ÷ (b × c) and a − (b + c) need parentheses, a × (b × c) does not.
                inverse = text.endswith(("÷ ", "− ")) and part.binds <= self.binds
                inner = part._derivation(show)
                text += f"({inner})" if inverse or part.binds < self.binds else inner
        return text


def _combine(
    operation: Callable[[Any, Any], Any], left: Quantity, sign: str, right: Quantity, binds: int
) -> Quantity:
    known = left.value is not None and right.value is not None
    value = operation(left.value, right.value) if known else None
    return Quantity(value, parts=(left, sign, right), binds=binds)


def computed(function: Callable[..., Any], template: str, *operands: Quantity) -> Quantity:
    """Return ``function`` of the operands' values; ``{}`` in ``template`` stands for each of them.

    For what is more than arithmetic: a minimum, rounding, or an equation with a name.
    """
    values = [operand.value for operand in operands]
    parts = chain.from_iterable(zip_longest(template.split("{}"), operands, fillvalue=""))
    return Quantity(None if None in values else function(*values), parts=tuple(parts))


def rounded_down(quantity: Quantity) -> Quantity:
    """Return the largest whole number that is not above ``quantity``."""
    return computed(math.floor, "⌊{}⌋", quantity)


def sum_of(quantities: Iterable[Quantity]) -> Quantity:
    """Return the sum of at least one quantity; unknown if one of them is."""
    return reduce(operator.add, quantities)


def derivations(
    quantities: Iterable[Quantity], listed: set[str] | None = None
) -> Iterator[Quantity]:
    """Yield the quantities, each after the named ones that it was computed from; no name twice."""
    listed = set() if listed is None else listed
    for quantity in quantities:
        operands = [part for part in quantity.parts if isinstance(part, Quantity)]
        yield from derivations((part for part in operands if part.parts), listed)
        if quantity.name and quantity.name not in listed:
            listed.add(quantity.name)
            yield quantity
