"""Cascade: private inference sharded by tokens (paper, section 7): who holds what, and what each node computes."""
