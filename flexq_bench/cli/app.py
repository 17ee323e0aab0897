"""The composition root: registers all verbs, configures logging, maps errors to exit codes."""

from __future__ import annotations

import io
import logging
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import cache
from typing import TYPE_CHECKING, Annotated

import typer

from flexq_bench.cli.failures import exit_code_of
from flexq_bench.cli.verbs import VERBS, verb_group
from flexq_bench.errors import UsageError, one_line
from flexq_bench.exit_codes import INTERRUPTED, UNREAD, ExitCode
from flexq_bench.interrupts import was_interrupted
from flexq_bench.kernels.external import installed
from flexq_bench.logs import JsonFormatter
from flexq_bench.packages import PACKAGE, explain_missing, without_collection
from flexq_bench.runs.command_lines import NAME

if TYPE_CHECKING:
    from flexq_bench.kernels.contract import LinearKernel

DEBUG = "--debug"
_SHORT = ("status", "list", "alerts")  # verbs that mostly import

app = typer.Typer(
    name=NAME,
    cls=verb_group(VERBS),
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Measure quantized LLM kernels, store every result, find the commits that made them "
    "worse.",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(requested: bool) -> None:
    if requested:
        from flexq_bench.repository.provenance import package_version

        typer.echo(f"{NAME} {package_version()}")
        raise typer.Exit


@app.callback()
def configure(
    debug: Annotated[
        bool, typer.Option(DEBUG, help="Show tracebacks, and every log line.")
    ] = False,
    verbose: Annotated[
        int, typer.Option("-v", "--verbose", count=True, help="Log progress; -vv: log everything.")
    ] = 0,
    log_json: Annotated[
        bool,
        typer.Option("--log-json", help="Log lines as JSON, with run, job and worker; as -v."),
    ] = False,
    version: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=_show_version, help="Show the version."),
    ] = False,
) -> None:
    shows_progress = verbose or log_json
    level = (
        logging.DEBUG
        if debug or verbose > 1
        else logging.INFO
        if shows_progress
        else logging.WARNING
    )
    handler = logging.StreamHandler(sys.stderr)
    plain_formatter = logging.Formatter(f"{NAME}: %(message)s")
    handler.setFormatter(JsonFormatter() if log_json else plain_formatter)
    # no loggers of libraries, whose messages don't help users
    logger = logging.getLogger(PACKAGE)
    logger.handlers[:] = [handler]
    logger.setLevel(level)
    logger.propagate = False


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line (None: sys.argv) and return its exit code.

    An expected error prints one line on stderr; with --debug it raises.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if "OMP_WAIT_POLICY" not in os.environ:
        # A thread that waits for another spins for 8 ms, in which the other may wait for its CPU.
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # OpenMP's own with few CPUs
    installed.find_by(_described_installed)
    _accept_any_text()
    verb = next((word for word in arguments if not word.startswith("-")), "")
    with without_collection() if verb in _SHORT else nullcontext():
        code = _run(arguments)
    try:
        sys.stdout.flush()  # here, because a failure must change the exit code
    except OSError as error:
        # Python flushes again at exit, which must not fail a second time.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if code != ExitCode.PASS:
            return code
        if isinstance(error, BrokenPipeError):
            return UNREAD
        typer.echo(f"{NAME}: stdout: {one_line(error)}", err=True)
        return ExitCode.INFRASTRUCTURE
    return code


def _described_installed() -> Iterable[LinearKernel]:
    from flexq_bench.measure.external_kernels import describe_installed  # imports torch

    return describe_installed()


@cache
def _command() -> Callable[..., int | None]:
    """Return the parser of all verbs; it takes 0.2 s to build from their signatures."""
    return typer.main.get_command(app)


def _run(arguments: list[str]) -> int:
    try:
        _check_text(arguments)
        code = _command()(arguments, prog_name=NAME, standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):  # see flexq_bench/interrupts.py
        return INTERRUPTED
    except SystemExit:  # raised by Rich and the parser on a broken pipe; verbs raise typer.Exit
        return UNREAD
    except Exception as error:
        if DEBUG in arguments:
            raise
        if exit_code_of(error) is None and was_interrupted():
            return INTERRUPTED
        message, code = _explain(error)
        typer.echo(f"{NAME}: {message}", err=True)
    return int(code or ExitCode.PASS)


def _check_text(arguments: Sequence[str]) -> None:
    """Raise UsageError for arguments that are not valid text, which could not be stored."""
    for number, word in enumerate(arguments, start=1):
        try:
            word.encode()
        except UnicodeEncodeError:
            raise UsageError(
                f"argument {number} is no text in this locale's encoding: write it in UTF-8"
            ) from None


def _accept_any_text() -> None:
    """Make the standard streams accept any text, so that printing never fails."""
    # They are None if the program was started without them (`>&-`, some daemons).
    sys.stdout, sys.stderr = sys.stdout or io.StringIO(), sys.stderr or io.StringIO()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # of µ and × if the locale is not UTF-8


def _explain(error: Exception) -> tuple[str, int]:
    expected = exit_code_of(error)
    if expected is not None:
        return one_line(error), expected
    if isinstance(error, ModuleNotFoundError):
        missing = explain_missing(error)
        if missing is not None:
            return missing, ExitCode.INFRASTRUCTURE
    # The option parser's exceptions have this method; their class is not public.
    message = getattr(error, "format_message", None)
    if callable(message):
        text = " ".join(str(message()).split())
        return text or f"which verb? `{NAME} --help` lists them", ExitCode.USAGE
    return (
        f"unexpected {type(error).__name__}: {one_line(error)} (a defect: run it again with "
        f"`{NAME} {DEBUG} …` and report what it prints)",
        ExitCode.INFRASTRUCTURE,
    )
