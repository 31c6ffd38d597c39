"""The order of a question's documents, by what the engine has cached."""
