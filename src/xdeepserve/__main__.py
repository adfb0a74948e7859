"""`python -m xdeepserve`: the command line, with every warning shown once."""

import sys
import warnings

from xdeepserve.cli import main

warnings.simplefilter("default")
sys.exit(main())
