"""Defenses: each is one stage of a channel, between the provider's model and what the attacker sees.

They import only ``hiddenlab``: names resolve through its registry, and its channel composes them.
"""
