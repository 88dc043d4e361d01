"""Run the command line: ``hiddenlab``, or ``python -m hiddenlab``."""

import sys


def main() -> None:
    """Import the command line and run it; an interrupt while it is being imported ends as one later does."""
    try:
        from hiddenlab.cli import main as run
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
