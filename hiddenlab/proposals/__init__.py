"""Proposals: which token to try first, given observed states (probe) and the recovered prefix (language model)."""
