"""``python -m batchjob_scheduler.cli``."""

import sys

from batchjob_scheduler.cli.main import main

sys.exit(main())
