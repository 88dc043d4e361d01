"""hiddenlab: a lab in which hidden states of language models are attacked and defended."""

__version__ = "0.1.0"
