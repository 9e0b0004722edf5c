"""``python -m batchjob_testkit.simulator``."""

import logging

from batchjob_testkit.simulator.command import main

if __name__ == "__main__":
    # An engine's log says how it was configured, which is made up here.
    logging.disable(logging.WARNING)
    main()
