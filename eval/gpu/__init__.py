"""Prove and time the engine on a graphics card: ``python -m eval.gpu`` (see docs/gpu.md)."""
