"""Print a copy of the installed SageMaker SDK's tables of training images (``make images``)."""

from __future__ import annotations

import json
from importlib.metadata import version

from sm_train.estimators.request.image_table import FRAMEWORKS, sdk_table


def main() -> None:
    """Print the document of ``estimators/data/images.json``."""
    source = f"Apache-2.0, sagemaker {version('sagemaker')}, core/image_uri_config"
    tables = {name: {"training": sdk_table(name)["training"]} for name in FRAMEWORKS}
    print(json.dumps({"source": source, "tables": tables}, separators=(",", ":")))


if __name__ == "__main__":
    main()
