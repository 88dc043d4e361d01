"""Verify that an inference provider ran the model and the sampler that it advertises."""
