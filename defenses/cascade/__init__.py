"""Run a model in Cascade: private inference sharded by tokens over several nodes (Hidden No More, section 7)."""
