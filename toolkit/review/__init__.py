"""``sm-train review``: was the time well used, by a job's own lines and CloudWatch's metrics."""
