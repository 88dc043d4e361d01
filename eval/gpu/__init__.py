"""Prove and time the engine on a graphics card: ``python -m hiddenlab.eval.gpu`` (see docs/gpu.md)."""
