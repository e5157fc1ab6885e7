"""Runs on Kubernetes and Slurm: manifests, plans, and what their nodes stored."""
