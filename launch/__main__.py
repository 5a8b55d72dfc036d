"""`python -m launch <verb> ...` is `jprm <verb> ...`, for a checkout in which jprm is not installed."""

import sys

from jprm.cli import main

sys.exit(main())
