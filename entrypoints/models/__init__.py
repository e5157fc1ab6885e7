"""Models: built, sampled, exported."""

ENTRANCES = (
    "builder",
    "component_files",
    "components",
    "device_copy",
    "fp8_layers",
    "image_grid",
    "image_sampling",
    "lora",
    "model_card",
    "model_folders",
    "objectives",
    "pipeline",
    "trained_network",
    "weight_files",
)
"""Modules through which other wings enter."""
