"""Options shared by gates: the judged revisions, the policy, and files for reports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from flexq_bench.errors import UsageError
from flexq_bench.runs.result_files import STDOUT, check_writable

ReportT = TypeVar("ReportT")

report_option = partial(typer.Option, rich_help_panel="Policy and reports")

PolicyOption = Annotated[
    str,
    report_option(
        "--policy", metavar="FILE", help="A .toml file, or the name of a built-in policy."
    ),
]

BaseOption = Annotated[str, typer.Option("--base", metavar="REV", help="Revision to compare with.")]
BothRevisionsOption = Annotated[
    Path, typer.Option("--repository", metavar="FOLDER", help="Git checkout with both revisions.")
]


@dataclass(frozen=True)
class ReportOptions:
    """Files to write a gate's report to."""

    markdown: Annotated[
        str | None,
        report_option(metavar="FILE", help="Write a Markdown comment for a pull request."),
    ] = None
    as_json: Annotated[
        str | None,
        report_option("--json", metavar="FILE", help="Write JSON to a file; - for stdout."),
    ] = None

    def check(self) -> None:
        """Raise UsageError for files that can't be written, before measuring."""
        named = {option: path for option, path in self.paths().items() if path is not None}
        for option, path in named.items():
            if path != STDOUT:
                check_writable(option, path)
        paths = [path for path in named.values() if not path.startswith("/dev/")]
        twice = [option for option, path in named.items() if paths.count(path) > 1]
        if twice:
            raise UsageError(f"{' and '.join(twice)} name the same place: give each its own")

    def paths(self) -> dict[str, str | None]:
        """Return the path of each option."""
        return {"--markdown": self.markdown, "--json": self.as_json}

    @property
    def use_stdout(self) -> bool:
        """True if a report is written to stdout, so that nothing else may be."""
        return STDOUT in self.paths().values()

    def write(self, report: ReportT, **writers: Callable[[ReportT], str]) -> None:
        """Write the report in each format. Raises UsageError if a file can't be written."""
        for option, path in self.paths().items():
            if path is None:
                continue
            text = writers[option.removeprefix("--")](report)
            if path == STDOUT:
                typer.echo(text, nl=False)
            else:
                try:
                    Path(path).write_text(text, encoding="utf-8")
                except OSError as error:
                    raise UsageError(f"can't write {path}: {error.strerror or error}") from error


@dataclass(frozen=True)
class JunitReportOptions(ReportOptions):
    """Files to write a gate's report to, one of them for a test runner."""

    junit: Annotated[str | None, report_option(metavar="FILE", help="Write JUnit XML.")] = None

    def paths(self) -> dict[str, str | None]:
        return {"--markdown": self.markdown, "--junit": self.junit, "--json": self.as_json}
