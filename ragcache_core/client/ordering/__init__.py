"""The order of a question's documents, after what the engine has cached."""
