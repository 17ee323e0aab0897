"""Numbers published in papers, kept apart from measurements: published/<paper>.toml.

A file has [paper], its tables, and the paper's names in the words of the catalog and registries:

[models], [kernels], [schemes]   name of the paper = name here. A kernel or scheme is looked up by
    all of its words, then by fewer: "W4A16 gptq fine", "W4A16 gptq", "gptq fine", "gptq". {bits} is
    w6a6; after | is what stands in for it on small models.
[absent]                         names that nothing here stands for = why
[weight_bits]                    of a kernel that another one with other bits stands in for
[accuracy]                       how accuracy tables are evaluated: context, bos, texts, calibration
[[table]]                        id, measures, metric, unit, better, hardware, setting, keys (names
    of the first cells of a row), columns, rows, notes; suite, cache: of a kernel table; commands:
    of a whole model; cannot: why nothing here can measure it; differs: why ours differ; caveats
[[statement]]                    a number of the text; ours: what is measured here for it; cannot:
    why nothing is
[[mismatch]], [[figure]]         contradictions of the paper; figures without numbers, with suite
    or commands

A cell is a number, "-" (none) or "?" (unreadable).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from flexq_bench.workloads.case import CacheMode
from flexq_bench.workloads.data_files import (
    AnyText,
    Count,
    DataTable,
    Entries,
    Flag,
    Text,
    Texts,
    read_toml,
    validated,
)
from flexq_bench.workloads.errors import WorkloadError
from flexq_bench.workloads.names import unknown

NO_NUMBER = ("-", "?")
Better = Literal["", "lower", "higher"]
Words = Mapping[str, str]
_NONE: Words = {}
Number = Annotated[float, Field(strict=True)]
_PLACE = re.compile(r"table|section|appendix|abstract|figure|caption|\d+$")
_FULL = "FP16"  # the scheme of an unquantized model
_SUBJECTS = ("kernel", "scheme", "method", "grain", "step", "group", "calibration", "direction")


class PaperTable(DataTable):
    """[paper]."""

    key: Text
    title: Text
    arxiv: Text
    version: AnyText = ""
    code: AnyText = ""
    models: Words = _NONE

    @property
    def source(self) -> str:
        return f"{self.title}, arXiv:{self.arxiv}"


class AccuracyProtocol(DataTable):
    """[accuracy]. texts: kind of text (see accuracy.texts) of each task of the paper."""

    context: Count
    bos: Text
    texts: Words
    calibration: AnyText = ""


class Subject(DataTable):
    """Kernels or schemes that are measured here for a statement.

    kernel: a label, or a scheme of a whole model; baseline: likewise, of a ratio. on_down: both on
    down_proj and fc2, where the paper has 8-bit activations. layer: only of these layers. phase:
    prefill, of a prompt instead of decoding.
    """

    kernel: Text
    baseline: AnyText = ""
    on_down: tuple[str, ...] = ()
    suite: AnyText = ""
    layer: AnyText = ""
    model: AnyText = ""
    phase: Literal["", "prefill"] = ""


class Statement(DataTable):
    """A number of the running text: value, or low and high."""

    NAME_KEY: ClassVar[str] = "id"
    id: Text
    where: Text
    metric: Text
    value: Number | None = None
    low: Number | None = None
    high: Number | None = None
    unit: AnyText
    better: Better = ""
    bound: AnyText
    subject: Text
    baseline: AnyText = ""
    what: AnyText = ""
    hardware: AnyText = ""
    model: AnyText = ""
    task: AnyText = ""
    m: Count | None = None
    n: Count | None = None
    k: Count | None = None
    batch: Count | None = None
    setting: Mapping[str, Any] = {}
    check: AnyText = ""
    ours: Subject | None = None
    cannot: AnyText = ""
    caveat: AnyText = ""

    @model_validator(mode="after")
    def _check_value(self) -> Self:
        if (self.value is None) == (self.low is None) or (self.low is None) != (self.high is None):
            raise WorkloadError("give either value, or low and high")
        return self

    @property
    def range(self) -> tuple[float, float]:
        """The stated number, or both ends of its range."""
        low = self.value if self.low is None else self.low
        high = self.value if self.high is None else self.high
        assert low is not None
        assert high is not None
        return float(low), float(high)

    @property
    def text(self) -> str:
        """The stated number or range, with its unit."""
        low, high = self.range
        return f"{low:g}{'' if low == high else f' to {high:g}'} {self.unit}".rstrip()

    @property
    def of(self) -> str:
        """The model, task, batch and shape that it is of."""
        sizes = [f"{name} = {getattr(self, name)}" for name in ("m", "n", "k", "batch")]
        known = [size for size in sizes if not size.endswith("None")]
        return ", ".join(filter(None, (self.model, self.task, *known)))

    def is_about(self, entry: str) -> bool:
        """Return True if its place in the paper names a table or figure, by its id."""
        kind, _, number = entry.partition("-")
        return bool(re.search(rf"\b{kind}[ -]{re.escape(number)}(?![\d.])", self.where))


class Mismatch(DataTable):
    """A contradiction. kind: mean, text, misprint (of the paper), elsewhere (other sources)."""

    kind: Literal["mean", "text", "misprint", "elsewhere"]
    where: Text
    about: Text

    def is_of(self, table: PublishedTable) -> bool:
        """Return True if it is about a table.

        Its place names the table, else its text does; one without a place is of all tables with
        such cells.
        """
        named = _tables_named(self.where) or _tables_named(self.about)
        is_anywhere = not re.search(r"table|section|abstract|figure|appendix", self.where)
        return table.id in named or (is_anywhere and any(map(self.marks, table.cells())))

    def marks(self, cell: Cell) -> bool:
        """Return True if its place names all that a cell is of: `table-1, i-llm W4A4, llama-7b`."""
        text = re.sub(r"\((\d+),\d+\)x\((\d+),(\d+)\)", r"m=\1 k=\2 n=\3", self.where.lower())
        parts = [part for part in re.split(r", | of ", text) if not _PLACE.match(part)]
        of = {str(value).lower() for value in cell.at.values()} | set(cell.metric.split("-"))
        of |= {f"{name}={cell.at.get(name)}" for name in "mnk"}
        of |= {part for value in of for part in (value.partition("-")[0], *value.split())}
        return bool(parts) and all(
            any(set(words.split()) <= of for words in part.split(" and ")) for part in parts
        )


def _tables_named(text: str) -> set[str]:
    lists = re.findall(r"tables? ((?:\d+, )*\d+)", text)
    listed = {f"table-{number}" for group in lists for number in group.split(", ")}
    return {*re.findall(r"table-\w+(?:\.\w+)*", text), *listed}


class Figure(DataTable):
    """A figure without numbers in the text."""

    id: Text
    shows: Text
    stated: Text
    suite: AnyText = ""
    commands: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Cell:
    """A number of a table.

    at: what it is of, by name: keys and columns of the table, and m, n, k, task and model of its
    setting. value None: the paper has none; it may print NaN or infinity.
    """

    row: int
    column: int
    metric: str
    unit: str
    better: str
    value: float | None
    at: Mapping[str, Any] = field(default_factory=dict)

    @property
    def subject(self) -> str:
        """Words that differ between the cells that the paper compares."""
        return " ".join(str(self.at[k]) for k in _SUBJECTS if str(self.at.get(k, "none")) != "none")

    @property
    def place(self) -> tuple[Any, ...]:
        """Values that the compared cells have in common."""
        others = sorted((k, v) for k, v in self.at.items() if k not in (*_SUBJECTS, "stat"))
        return (self.metric, *others)


class PublishedTable(DataTable):
    """[[table]]; see the module."""

    NAME_KEY: ClassVar[str] = "id"
    id: Text
    measures: Text
    metric: AnyText
    unit: AnyText
    better: Better
    hardware: AnyText
    setting: Mapping[str, Any] = {}
    notes: tuple[str, ...] = ()
    keys: Texts
    columns: Annotated[tuple[Mapping[str, Any], ...], Field(min_length=1)]
    rows: Annotated[tuple[tuple[Any, ...], ...], Field(min_length=1)]
    mean_of: AnyText = ""
    weighted_mean: Flag = False
    repaired: tuple[str, ...] = ()
    columns_inferred: tuple[str, ...] = ()
    labels: AnyText = ""
    suite: AnyText = ""
    cache: CacheMode = "cold"
    commands: tuple[str, ...] = ()
    cannot: AnyText = ""
    differs: AnyText = ""
    caveats: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _check_rows(self) -> Self:
        width = len(self.keys) + len(self.columns)
        for position, row in enumerate(self.rows, start=1):
            if len(row) != width:
                raise WorkloadError(f"row {position} must have {width} cells, got {len(row)}")
            for cell in row[len(self.keys) :]:
                is_number = isinstance(cell, int | float) and not isinstance(cell, bool)
                if not is_number and cell not in NO_NUMBER:
                    raise WorkloadError(f'row {position}: a number, "-" or "?", got {cell!r}')
        return self

    def cells(self) -> Iterator[Cell]:
        """Yield all cells, row by row."""
        return iter(self._cells)

    @cached_property
    def _cells(self) -> tuple[Cell, ...]:
        return tuple(self._made_cells())

    def _made_cells(self) -> Iterator[Cell]:
        names = ("m", "n", "k", "model", "task", "scheme")
        setting = {name: self.setting[name] for name in names if name in self.setting}
        of_table = {"metric": self.metric, "unit": self.unit, "better": self.better}
        for i, row in enumerate(self.rows):
            keys = dict(zip(self.keys, row, strict=False))
            for j, (column, given) in enumerate(
                zip(self.columns, row[len(self.keys) :], strict=True)
            ):
                at = setting | keys | dict(column)
                kind = {name: str(column.get(name, of_table[name])) for name in of_table}
                value = None if given in NO_NUMBER else float(given)
                of = {k: v for k, v in at.items() if k not in of_table}
                yield Cell(i, j, kind["metric"], kind["unit"], kind["better"], value, of)


class Paper(DataTable):
    """A file of a paper."""

    paper: PaperTable
    models: Words = _NONE
    kernels: Words = _NONE
    schemes: Words = _NONE
    absent: Words = _NONE
    weight_bits: Mapping[str, Count] = {}
    accuracy: AccuracyProtocol
    table: Entries[PublishedTable]
    statement: Entries[Statement]
    mismatch: tuple[Mismatch, ...] = ()
    figure: tuple[Figure, ...] = ()

    @property
    def key(self) -> str:
        return self.paper.key

    def mismatches(self, table: PublishedTable) -> tuple[Mismatch, ...]:
        """Return the contradictions about a table."""
        return self._mismatches[table.id]

    @cached_property
    def _mismatches(self) -> Mapping[str, tuple[Mismatch, ...]]:
        return {t.id: tuple(m for m in self.mismatch if m.is_of(t)) for t in self.table}

    def model(self, name: str) -> str:
        """Return the catalog's name of a model."""
        return self.models.get(name, name)

    def kernel(self, cell: Cell) -> str:
        """Return the label of the kernel that is measured here for a cell; empty: none."""
        words = (str(cell.at.get("kernel", "")), str(cell.at.get("scheme", "")))
        label = self._looked_up(self.kernels, words)
        return (label or words[0]).format(bits=words[1].lower())

    def bits_of_weights(self, cell: Cell) -> int | None:
        """Return the bits of the paper's kernel, where they are not those of ours."""
        words = (str(cell.at.get("kernel", "")), str(cell.at.get("scheme", "")))
        return self.weight_bits.get(" ".join(words))

    def schemes_of(self, cell: Cell) -> tuple[str, ...]:
        """Return the schemes that are evaluated here for a cell; none: see why_absent.

        The first has the paper's settings; others stand in for it on small models.
        """
        if str(cell.at.get("scheme", "")) == _FULL:
            return ("fp16",)
        words = self._words(cell)
        schemes = self._looked_up(self.schemes, words)
        if schemes is None or self._looked_up(self.absent, words):
            return ()
        return tuple(schemes.format(bits=str(cell.at.get("scheme", "")).lower()).split(" | "))

    def why_absent(self, cell: Cell) -> str:
        """Return why nothing here stands for a cell's scheme or model; empty: something does."""
        of_model = self.absent.get(str(cell.at.get("model", "")), "")
        return of_model or self._looked_up(self.absent, self._words(cell)) or ""

    def _words(self, cell: Cell) -> tuple[str, ...]:
        names = ("scheme", "method", "step", "grain", "group")
        listed = [str(cell.at[name]) for name in names if name in cell.at]
        return tuple(word for word in listed if word != "none")

    @staticmethod
    def _looked_up(names: Words, words: tuple[str, ...]) -> str | None:
        """Look up all words, then fewer: without the last ones, then without the first."""
        for first in range(len(words)):
            for last in range(len(words), first, -1):
                label = names.get(" ".join(words[first:last]))
                if label is not None:
                    return label
        return None


@cache
def published_papers() -> tuple[Paper, ...]:
    """Return all papers, in the order of their files. Raises WorkloadError for a damaged one."""
    folder = resources.files("flexq_bench") / "workloads" / "published"
    files = sorted((f for f in folder.iterdir() if f.name.endswith(".toml")), key=lambda f: f.name)
    return tuple(read_paper(file) for file in files)


def read_paper(file: Traversable) -> Paper:
    """Read a paper from a file. Raises WorkloadError with the file, the entry and the key."""
    paper = validated(Paper, read_toml(file), file.name)
    for kind, entries in (("table", paper.table), ("statement", paper.statement)):
        ids = [entry.id for entry in entries]
        if twice := [name for name in ids if ids.count(name) > 1]:
            raise WorkloadError(f"{file.name}: two {kind}s are called {twice[0]}")
    return paper


def get_paper(key: str) -> Paper:
    """Return a paper by its key. Raises WorkloadError with the nearest names."""
    for paper in published_papers():
        if paper.key == key:
            return paper
    raise WorkloadError(unknown("paper", key, [paper.key for paper in published_papers()]))


def select_tables(name: str | None) -> list[tuple[Paper, PublishedTable]]:
    """Return the tables of PAPER or PAPER/TABLE; None: all. Raises WorkloadError."""
    if name is None:
        return [(paper, table) for paper in published_papers() for table in paper.table]
    key, _, table_id = name.partition("/")
    paper = get_paper(key)
    tables = [(paper, table) for table in paper.table if table_id in ("", table.id)]
    if not tables:
        raise WorkloadError(unknown(f"table of {key}", table_id, [t.id for t in paper.table]))
    return tables
