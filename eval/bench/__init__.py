"""Time the attacks, Cascade and MPC baselines against each other: one module per bench."""
