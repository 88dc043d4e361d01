"""Serve every room: files, cache, checked JSON, safe text, the description of the machine."""
