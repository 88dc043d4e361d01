"""Attacks: each recovers tokens from an observation and the public model, and never sees a secret.

They import only ``hiddenlab``; names resolve through ``hiddenlab.registry``.
"""
