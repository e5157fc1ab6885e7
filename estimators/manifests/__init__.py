"""The same run on other clusters: manifests for Kubernetes and a batch script for Slurm. Pure."""
