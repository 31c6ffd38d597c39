"""What reuse of documents anywhere saves and costs."""
