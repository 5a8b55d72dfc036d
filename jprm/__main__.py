"""`python -m jprm` is `jprm`."""

import sys

from jprm.cli import main

sys.exit(main())
