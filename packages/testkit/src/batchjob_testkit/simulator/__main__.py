"""``python -m batchjob_testkit.simulator``."""

from batchjob_testkit.simulator.command import main

if __name__ == "__main__":
    main()
