"""What was measured of a model once: the times of its prefills, the quality of its reused chunks."""
