"""Starts a node outside of SageMaker: on Kubernetes or Slurm. Standard library only at its top."""
