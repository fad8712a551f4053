"""`python -m mla`."""

import sys

from mla.cli import main

if __name__ == "__main__":
    sys.exit(main())
