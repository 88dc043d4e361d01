"""Measure cells of experiments: each function takes a cell and answers with figures and intervals."""
