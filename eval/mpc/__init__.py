"""Run the MPC baselines, each in its own environment, which 'make mpc' installs."""
