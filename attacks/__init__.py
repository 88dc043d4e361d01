"""Recover tokens from an observation and the public model; each attack is one class, listed in ``__init__.pyi``.

An attack never sees a ground truth. Attacks import ``hiddenlab``, but neither defenses nor experiments.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
