"""A lab in which hidden states of language models are attacked and defended.

The names of this package are listed in ``__init__.pyi``. Each is imported when it is first used, so that importing the
package costs nothing.
"""

import lazy_loader

__version__ = "0.1.0"
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
