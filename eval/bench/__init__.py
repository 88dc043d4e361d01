"""Time the engine, Cascade and MPC baselines against each other: one module a bench."""
