"""`python -m flexq_bench.cli`: the same program as `flexq-bench`."""

import sys

from flexq_bench.cli.app import main

if __name__ == "__main__":
    sys.exit(main())
