"""`python -m raptor` is the command."""

import sys

from raptor.cli import main

sys.exit(main())
