"""What overlap and order bring."""
