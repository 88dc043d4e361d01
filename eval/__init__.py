"""Run experiments (one per table or figure of a paper), compute their metrics, and run benchmarks.

These modules may import every other folder of the package.
"""
