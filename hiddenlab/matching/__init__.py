"""Compare candidate states with observed rows: distances, thresholds, screening, batched runs."""
