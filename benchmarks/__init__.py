"""Measurements of RAGCache against its baselines. They are not part of the wheel."""
