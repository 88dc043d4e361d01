"""A lab in which hidden states of language models are attacked and defended.

The names of this package are listed in ``__init__.pyi``. Each is imported when it is first used, so that importing the
package costs nothing.
"""

import lazy_loader

try:
    from hiddenlab._version import __version__  # written when the package is built or installed
except ImportError:
    __version__ = "0.1.0.dev0"  # a source tree that was never installed

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
