"""Run a model in Cascade: private inference sharded by tokens over several nodes (paper, section 7)."""
