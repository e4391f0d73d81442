"""`raptor` and `python -m raptor` are the command."""

import sys

from raptor.terminal.streams import stopped_by_signals


def main() -> int:
    """Run the command line, which may be stopped while it is still imported."""
    with stopped_by_signals():
        try:
            # Only here: options and their checks take a third of a second to import.
            from raptor.cli import main as run
        except KeyboardInterrupt:
            print("raptor: stopped", file=sys.stderr)
            return 130
        return run()


if __name__ == "__main__":
    sys.exit(main())
