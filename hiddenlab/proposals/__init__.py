"""Propose which tokens to try first, from observed states (probe) and the recovered prefix (language model)."""
