"""Environment variables by which `flexq-bench dashboard` tells the app how to behave."""

from __future__ import annotations

READ_ONLY_VARIABLE = "FLEXQ_BENCH_READ_ONLY"  # set and not empty: write nothing
SERVER_VARIABLE = "FLEXQ_BENCH_SERVER"  # set: the process does nothing but show the app
COMMIT_URL_VARIABLE = "FLEXQ_BENCH_COMMIT_URL"  # template of a commit's address
PLACE_OF_SHA = "{sha}"  # in that template
