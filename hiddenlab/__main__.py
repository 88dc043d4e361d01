"""Run the command line as ``python -m hiddenlab``."""

from hiddenlab.cli import main

if __name__ == "__main__":
    main()
