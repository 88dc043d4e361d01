"""Measure cells of experiments: each function takes a cell's spec and returns figures with their intervals."""
