"""Requests sent before a search has ended, whose answers the equal real request adopts."""
