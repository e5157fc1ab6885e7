"""Counts what the images of a data set state about their colors, from the codes in its index.

:attr:`sm_train.entrypoints.images.stored_color.StoredColor.code` writes a code: the name of the
profile, the channels, the depth in bits, and at the end `HDR` or a signal that is not converted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sm_train.entrypoints.job_interface.job_config import UNRECORDED_COLOR, ColorPolicy

UNCONVERTED = "color-unconverted"
"""Name of images whose colors only a signal states that no reader converts."""

_MOST_UNCONVERTED = 0.001
"""Fraction of such images above which a command warns of them."""

_LIKE_SRGB = frozenset(("none", "sRGB"))


@dataclass(frozen=True)
class ColorCounts:
    """Numbers of images: by profile, by depth in bits, in CMYK, in HDR, and unconverted ones.

    ``unconverted`` are by the signal that states their colors.
    """

    profiles: dict[str, int]
    depths: dict[str, int]
    cmyk: int
    hdr: int
    unconverted: dict[str, int]

    @classmethod
    def of(cls, codes: Mapping[str, int]) -> ColorCounts:
        """Count images by the codes of an index."""
        profiles, depths, unconverted = Counter[str](), Counter[str](), Counter[str]()
        cmyk = hdr = 0
        for code, count in codes.items():
            profile, channels, depth, *signal = code.split("/")
            profiles[profile] += count
            depths[depth] += count
            cmyk += count * (channels == "CMYK")
            if signal and signal[0].startswith("HDR"):
                hdr += count
            elif signal:
                unconverted[signal[0]] += count
        ranked = (dict(counter.most_common()) for counter in (profiles, depths, unconverted))
        return cls(next(ranked), next(ranked), cmyk, hdr, next(ranked))

    @property
    def images(self) -> int:
        """The number of images of which it is known."""
        return sum(self.profiles.values())

    @property
    def is_usual(self) -> bool:
        """Whether all images are in sRGB, of 8 bits, and neither in CMYK nor in HDR."""
        others = self.cmyk or self.hdr or self.unconverted
        return not others and {*self.profiles} <= _LIKE_SRGB and {"8"} >= {*self.depths}

    def describe(self) -> str:
        """Return what there is of it: profiles, other depths than 8 bits, CMYK and HDR."""
        parts = [f"{name} {count:,}" for name, count in self.profiles.items()]
        parts += [f"{bits} bits {n:,}" for bits, n in self.depths.items() if bits != "8"]
        parts += [f"CMYK channels {self.cmyk:,}"] * bool(self.cmyk)
        parts += [f"HDR {self.hdr:,}"] * bool(self.hdr)
        parts += [f"{UNCONVERTED} ({name}) {n:,}" for name, n in self.unconverted.items()]
        return ", ".join(parts)

    def distortions(self, policy: ColorPolicy) -> Iterator[tuple[str, str, str]]:
        """Yield the key of a policy, what training sees differently from people, and the remedy."""
        if not self.images:
            return
        others = {name: n for name, n in self.profiles.items() if name not in _LIKE_SRGB}
        if policy.icc_profile == "ignore" and others:
            named = ", ".join(f"{name} {_share(n, self.images)}" for name, n in others.items())
            yield (
                "icc_profile",
                f"icc_profile: ignore takes {sum(others.values()):,} images of other color spaces "
                f"than sRGB as stored: {named}",
                "set icc_profile: srgb",
            )
        if policy.hdr == "reject" and self.hdr:
            yield (
                "hdr",
                f"{self.hdr:,} HDR images ({_share(self.hdr, self.images)}) are left out as "
                "image-hdr",
                "convert them to SDR, or set hdr: keep to take their levels as stored",
            )
        count = sum(self.unconverted.values())
        if policy.icc_profile == "srgb" and count > _MOST_UNCONVERTED * self.images:
            named = ", ".join(f"{name} {n:,}" for name, n in self.unconverted.items())
            yield (
                "icc_profile",
                f"{UNCONVERTED}: {count:,} images ({_share(count, self.images)}) state their "
                f"colors in PNG chunks alone, which are not converted: {named}",
                "embed a profile in them, as with ImageMagick's `-profile`",
            )


def recorded_color(record: Mapping[str, Any]) -> ColorPolicy:
    """Return the color policy of a record: an index's options, latents, an enrichment, a course."""
    stored = {name: record.get(name, value) for name, value in vars(UNRECORDED_COLOR).items()}
    return ColorPolicy(**stored)


def latents_problem(
    stored: ColorPolicy, policy: ColorPolicy, resolution: int
) -> tuple[str, str] | None:
    """Return why latents of the policy ``stored`` cannot be trained on with ``policy``, and a cure.

    None if they can.
    """
    if stored == policy:
        return None
    return (
        f"the latents were encoded with {stored}, and the run has {policy}",
        f"encode them again with `sm-train pack SRC DST --latents MODEL --resolution {resolution} "
        f"--icc-profile {policy.icc_profile} --hdr {policy.hdr}`, or set data.icc_profile: "
        f"{stored.icc_profile} and data.hdr: {stored.hdr}",
    )


def _share(count: int, total: int) -> str:
    share = count / total
    return f"{share:.0%}" if share >= 0.01 else f"{share:.2%}"
