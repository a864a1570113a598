"""`python -m benchmarks.endurance`."""

import sys

from benchmarks.endurance.run import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
