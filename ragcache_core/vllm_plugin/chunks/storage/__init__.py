"""Where chunks lie: host memory and disk."""
