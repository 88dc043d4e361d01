"""Define what a provider releases in place of raw hidden states: each class is one stage of a channel.

The stages are listed in ``__init__.pyi``. Three folders hold schemes that are more than a stage: Cascade, protocols and
verification. Defenses import ``hiddenlab``, but neither attacks nor experiments.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
