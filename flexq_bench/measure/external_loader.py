"""Process that imports external kernels and describes them.

    python -m flexq_bench.measure.external_loader

Its requests are `load`, `installed` and `machine_code`; see flexq_bench.measure.worker_messages.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from flexq_bench.errors import one_line
from flexq_bench.kernels import registry
from flexq_bench.kernels.contract import ExternalKernel
from flexq_bench.kernels.errors import SourceError
from flexq_bench.kernels.external.loading import load, load_installed, refuse_taken
from flexq_bench.kernels.external.sources import KernelSource
from flexq_bench.measure.own_quantization import plain_description
from flexq_bench.measure.process_limits import limit_memory
from flexq_bench.measure.worker_server import end_process, own_pipes, serve
from flexq_bench.repository.build_imports import import_from_build
from flexq_bench.workloads.patterns import matches_any


class Loader:
    """The operations of the process."""

    def load(self, source: str) -> dict[str, Any]:
        """Specs of the kernels, and the output of the source. Raises SourceError."""
        loaded = load(KernelSource.of_argument(source))
        specs = [plain_description(kernel) for kernel in loaded.kernels]
        return {"specs": specs, "printed": loaded.printed}

    def installed(self) -> dict[str, Any]:
        """Specs of the kernels of installed packages."""
        return {"specs": [plain_description(kernel) for kernel in load_installed()]}

    def machine_code(
        self, source: str, targets: list[str], out: str, patterns: list[str] | None
    ) -> dict[str, Any]:
        """Write the cubins of the kernels that offer one to files in `out`.

        Returns also the reasons of kernels that don't compile, and all labels. patterns: of the
        labels to compile; None: all of them. Raises SourceError.
        """
        loaded = load(KernelSource.of_argument(source)).kernels
        kernels = [kernel for kernel in loaded if kernel.spec.backend != "cpu"]
        compiled: list[dict[str, str]] = []
        for kernel in kernels:
            label = kernel.spec.label
            if patterns is not None and not matches_any(patterns, label):
                continue
            for target in targets:
                with suppress(_NoCodeError):
                    answer = {"kernel": label, "target": target}
                    compiled.append(answer | _compiled(kernel, target, Path(out)))
        return {"compiled": compiled, "labels": [kernel.spec.label for kernel in kernels]}


class _NoCodeError(Exception):
    """A kernel that offers no machine code."""


def _compiled(kernel: ExternalKernel, target: str, out: Path) -> dict[str, str]:
    try:
        code = kernel.machine_code(target)
        if code is not None and not isinstance(code, bytes):
            raise TypeError(f"machine_code must return bytes, got {type(code).__name__}")
    except Exception as error:  # external code may raise any exception
        return {"error": one_line(error)}
    if code is None:
        raise _NoCodeError
    name = f"{hashlib.sha256(code).hexdigest()}.cubin"
    (out / name).write_bytes(code)
    return {"code": name}


def add_kernels(arguments: list[str]) -> None:
    """Load the sources of a worker's `--kernels-from` options.

    Gradients are turned off, because kernels of modules have weights that require them. A source
    that does not load is no error here: each of its kernels is refused with the reason.
    """
    torch.set_grad_enabled(False)
    if arguments:
        import_from_build()
    owners: dict[tuple[str, str], KernelSource] = {}
    for argument in arguments:
        source = KernelSource.of_argument(argument)
        try:
            kernels = load(source).kernels
            refuse_taken(kernels, source, owners)
            registry.add(kernels)
        except SourceError as error:
            registry.add_failure(source.prefix, str(error))
            sys.stderr.write(f"{error}\n")
    registry.external_labels()


def add_option(parser: argparse.ArgumentParser) -> None:
    """Add the option of a worker that runs external kernels."""
    parser.add_argument("--kernels-from", action="append", default=[], metavar="PACKAGE=PLACE")


def main() -> None:
    requests, replies = own_pipes()
    limit_memory("cpu")
    import_from_build()
    serve(Loader(), requests, replies, ("load", "installed", "machine_code"))


if __name__ == "__main__":
    main()
    end_process()
