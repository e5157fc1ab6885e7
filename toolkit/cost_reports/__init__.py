"""What ``sm-train cost`` shows: estimates, comparisons, alternatives, actual costs, past jobs."""
