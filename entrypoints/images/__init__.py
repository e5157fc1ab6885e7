"""Pixels of image files: headers, decoders and colors."""

ENTRANCES = (
    "buffer_pool",
    "color",
    "decoder_pool",
    "extra_decoder",
    "icc_profile",
    "image_decoder",
    "image_header",
    "stored_color",
)
"""Modules through which other wings enter."""
