"""Environment variables by which `flexq-bench dashboard` configures the app."""

from __future__ import annotations

READ_ONLY_VARIABLE = "FLEXQ_BENCH_READ_ONLY"  # not empty: read-only
SERVER_VARIABLE = "FLEXQ_BENCH_SERVER"  # not empty: the process runs only the app
COMMIT_URL_VARIABLE = "FLEXQ_BENCH_COMMIT_URL"  # template of a commit's URL
PLACE_OF_SHA = "{sha}"  # placeholder in this template
