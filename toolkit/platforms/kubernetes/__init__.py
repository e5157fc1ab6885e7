"""What Kubernetes does with jobs."""
