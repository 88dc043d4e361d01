"""MPC baselines, each run in an environment of its own: 'make mpc'."""
