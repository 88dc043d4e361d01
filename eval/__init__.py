"""Experiments (one a paper table or figure), metrics and benchmarks; may import every other room."""
