"""Provide files, cache, checked JSON, seeds and the description of the machine to all other modules."""
