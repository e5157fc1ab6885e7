"""Plans a run and starts its jobs, on SageMaker, a cluster or this machine."""

ENTRANCES = (
    "local.launcher",
    "plan_view",
    "planned_job",
    "relocation",
    "run_bundle",
    "submission",
    "submit",
    "train_locally",
)
"""Modules through which other wings enter."""
