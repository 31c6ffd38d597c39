"""Recall, precision and cost of the recognition of documents in prompts' tokens, without a model."""
