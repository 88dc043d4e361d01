"""Check and time passes and attacks on a graphics card: ``python -m hiddenlab.eval.gpu`` (see docs/how-to/gpu.md)."""
