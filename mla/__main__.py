"""`python -m mla`."""

import sys

from mla.cli import main

sys.exit(main())
