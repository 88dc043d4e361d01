"""Change what a provider releases: one class a stage of a channel, listed in ``__init__.pyi``.

Beside the stages stand the schemes that are more than a stage: Cascade, protocols, verification. Defenses import
``hiddenlab``, neither attacks nor experiments.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
