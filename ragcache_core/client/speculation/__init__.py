"""Requests that are sent before a search has ended, and joined by the real request when they match it."""
