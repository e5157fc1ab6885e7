"""The commands in groups with their summaries, kept apart so that `--help` imports no command."""

from __future__ import annotations

GROUPS: dict[str, dict[str, str]] = {
    "Start": {
        "init": "Write a commented run file for your account.",
    },
    "Data": {
        "pack": "Pack images and captions into WebDataset shards.",
        "stream": "Show and control images that are packed as they arrive.",
        "enrich": "Make columns for images with a function of your own.",
        "index": "Build the index of existing shards.",
        "remove": "Remove samples from shards, and never train on them again.",
        "lineage": "Show which shards, runs and checkpoints have an image.",
        "data-report": "Report what data sets consist of.",
        "data-preview": "Write a page with what training sees of its data.",
        "fetch-model": "Copy a pretrained model from the Hugging Face Hub.",
    },
    "Plan": {
        "check": "Find errors and waste before money is spent.",
        "cost": "Estimate what a run costs, in dollars and days.",
        "measure": "Measure a stage's speed in short jobs with a price limit.",
        "instances": "List instance types: GPUs, memory, EFA and price.",
        "plans": "Search offerings of training plans for a run.",
    },
    "Run": {
        "submit": "Show plan and cost, ask for confirmation, and start the run.",
        "manifest": "Write a run as a manifest for Kubernetes or Slurm.",
        "stop": "Stop a run after a checkpoint.",
        "resume": "Continue a run at the step where it ended.",
        "sample": "Sample images from a checkpoint into a grid.",
        "compare": "Build a page for blind comparison of two checkpoints.",
        "export": "Turn a checkpoint into a model for other tools.",
    },
    "Monitor": {
        "list": "List the runs of this account and region.",
        "status": "Show a run's progress, its cost so far and its projected cost.",
        "logs": "Print or follow the log of a run's job.",
        "watch": "Follow a run, restart lost jobs and enforce the budget.",
        "alarms": "Create CloudWatch alarms for a run.",
        "review": "Report how well a job used its time, with evidence and fixes.",
    },
    "Fix": {
        "diagnose": "Find out why a job failed, from its logs.",
        "doctor": "Test a cluster's GPUs, network and storage.",
    },
    "Setup": {
        "config": "Show and set your defaults: region, profile, role and bucket.",
        "iam": "Print the least-privilege IAM policies for a run.",
        "image": "Print a run's container image, or a Dockerfile.",
        "template": "Print a template for packing or watching in AWS Lambda.",
        "schema": "Print the run file's JSON Schema.",
        "completion": "Print the completion script for a shell.",
    },
}
"""Heading in `sm-train --help` → command → its line."""

COMMANDS_OF_WINGS = {
    "analysis": ("diagnose", "review"),
    "clusters": ("manifest",),
    "data_prep": (
        *("pack", "stream", "enrich", "index", "remove", "lineage", "data-report"),
        "data-preview",
    ),
    "probes": ("measure", "doctor"),
}
"""Wing → the commands that lie in its folder ``commands``; those of the others are in this one."""

COMMANDS = {name: line for group in GROUPS.values() for name, line in group.items()}

_SUBMIT = "sm-train submit RUN starts a run, and with --local trains on this machine"
_LIST = "sm-train list shows the account's runs, sm-train status RUN one of them"
_STOP = "sm-train stop RUN ends a run after a checkpoint"
_INSTANCES = "sm-train instances lists GPUs and prices"
HINTS = {
    "train": _SUBMIT,
    "run": _SUBMIT,
    "launch": _SUBMIT,
    "start": _SUBMIT,
    "create": _SUBMIT,
    "up": _SUBMIT,
    "apply": _SUBMIT,
    "plan": "sm-train submit RUN --dry-run shows the plan and its cost",
    "dry-run": "sm-train submit RUN --dry-run shows the plan and its cost",
    "version": "sm-train --version prints it",
    "help": "sm-train --help lists the commands, sm-train COMMAND --help describes one",
    "ls": _LIST,
    "ps": _LIST,
    "jobs": _LIST,
    "queue": _LIST,
    "show": _LIST,
    "kill": _STOP,
    "cancel": _STOP,
    "down": _STOP,
    "delete": _STOP,
    "tail": "sm-train logs RUN --follow follows a log",
    "estimate": "sm-train cost RUN estimates dollars and days",
    "price": "sm-train cost RUN estimates dollars and days",
    "validate": "sm-train check RUN --offline checks a run file",
    "gpus": _INSTANCES,
    "show-gpus": _INSTANCES,
    "offers": _INSTANCES,
    "kubectl": "sm-train manifest RUN --to trainjob writes a manifest for Kubernetes",
    "sbatch": "sm-train manifest RUN --to slurm writes a batch script",
    "login": "aws configure or aws sso login signs in; sm-train config sets a profile",
    "configure": "sm-train config set KEY VALUE sets a default",
    "generate": "sm-train sample CHECKPOINT samples images",
    "infer": "sm-train sample CHECKPOINT samples images",
    "demo": "make demo runs the demo in a clone; sm-train init --preset demo writes its run file",
}
"""What users of other tools type → what does it here."""
