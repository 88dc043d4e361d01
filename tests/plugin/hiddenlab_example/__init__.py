"""An example plugin for hiddenlab."""
