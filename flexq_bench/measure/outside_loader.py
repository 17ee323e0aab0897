"""A process that imports kernels from outside and says what they are.

    python -m flexq_bench.measure.outside_loader

Its one request is `load`; see flexq_bench.measure.worker_messages.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from flexq_bench.measure.process_limits import limit_memory
from flexq_bench.measure.tampering import watch
from flexq_bench.measure.worker_server import own_stdout, serve
from kernels import registry
from kernels.errors import SourceError
from kernels.outside.described import spec_as_plain
from kernels.outside.loading import load
from kernels.outside.sources import KernelSource


class Loader:
    """The operations of the process."""

    def load(self, source: str) -> dict[str, Any]:
        """Specs of the kernels, and what the source printed. Raises SourceError."""
        loaded = load(KernelSource.of_argument(source))
        specs = [spec_as_plain(kernel.spec) for kernel in loaded.kernels]
        return {"specs": specs, "printed": loaded.printed}


def add_kernels(arguments: list[str]) -> None:
    """Load the sources of a worker's `--kernels-from` options.

    What a source that can't be had should have, this worker does not know; the others it does.
    """
    if arguments:
        watch()
    for argument in arguments:
        try:
            registry.add(load(KernelSource.of_argument(argument)).kernels)
        except SourceError as error:
            sys.stderr.write(f"{error}\n")


def add_option(parser: argparse.ArgumentParser) -> None:
    """The option of a worker that runs kernels from outside."""
    parser.add_argument("--kernels-from", action="append", default=[], metavar="PACKAGE=PLACE")


def main() -> int:
    replies = own_stdout()
    limit_memory("cpu")
    serve(Loader(), sys.stdin.buffer, replies, ("load",))
    return 0


if __name__ == "__main__":
    sys.exit(main())
