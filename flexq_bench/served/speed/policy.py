"""The tables `[[speed]]` of a policy: load, metrics and limits.

[[speed]]
name = "chat"                      # in reports and series
lengths = "sharegpt"               # fixed, sharegpt or recorded
longest = 2048                     # of sharegpt: tokens of prompt and answer
arrivals = "poisson"               # closed, constant, poisson or recorded
rate_per_s = 4.0                   # requests; of recorded: times the recorded speed
requests = 32                      # of a segment; a block is base, head, head, base
metrics = ["median_ttft", "median_tpot", "goodput"]   # see metrics.py
worse_percent = 2.0                # the largest accepted loss of a metric; 0: none
limits = { median_ttft = 5.0 }     # of single metrics instead
failed_percent = 0.5               # more failed requests than base that are accepted, of all
ttft_ms = 500.0                    # limits of goodput, also tpot_ms and e2e_ms

With lengths = "fixed": prompt_tokens and new_tokens. With "recorded": file (`read_trace`). With
arrivals = "closed": concurrency.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from flexq_bench.served.speed.metrics import LatencyLimits, Metric, metric
from flexq_bench.served.speed.requests import (
    PlannedRequest,
    fixed_lengths,
    read_trace,
    sharegpt_lengths,
    with_arrivals,
)
from flexq_bench.workloads.case import SERVING, Case
from flexq_bench.workloads.data_files import (
    Amount,
    AnyText,
    Count,
    DataTable,
    Natural,
    Text,
    Texts,
    must_be,
)
from flexq_bench.workloads.errors import WorkloadError
from flexq_bench.workloads.expressions import Value
from flexq_bench.workloads.operation import OperationWorkload

_NAME = re.compile(r"[a-z][a-z0-9_.-]{0,39}")
_KERNEL = re.compile(r"[^a-z0-9.-]+")
_DEFAULT = ("median_ttft", "median_tpot", "median_e2e", "tokens_per_s")

Lengths = Literal["fixed", "sharegpt", "recorded"]
Arrivals = Literal["closed", "constant", "poisson", "recorded"]


class SpeedTable(DataTable):
    """A validated table; see the docstring of this module."""

    NAME_KEY: ClassVar[str] = "name"

    name: Text
    lengths: Annotated[Lengths, must_be("fixed, sharegpt or recorded")] = "sharegpt"
    file: AnyText = ""
    prompt_tokens: Count = 256
    new_tokens: Count = 128
    longest: Count = 2048
    arrivals: Annotated[Arrivals, must_be("closed, constant, poisson or recorded")] = "closed"
    rate_per_s: Amount = 1.0
    concurrency: Count = 8
    requests: Count = 32
    warmup_requests: Natural = 16
    cooldown_s: Amount = 1.0
    request_timeout_s: Amount = 600.0
    metrics: Texts = _DEFAULT
    worse_percent: Amount = 2.0
    limits: dict[str, Amount] = Field(default_factory=dict)
    failed_percent: Amount = 0.5
    ttft_ms: Amount | None = None
    tpot_ms: Amount | None = None
    e2e_ms: Amount | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"a name is like chat-8, got {self.name!r}")
        try:
            known = [metric(name) for name in self.metrics]
        except WorkloadError as error:
            raise ValueError(str(error)) from None
        if (self.lengths == "recorded") != bool(self.file):
            raise ValueError('file goes with lengths = "recorded"')
        if self.arrivals == "recorded" and self.lengths != "recorded":
            raise ValueError('arrivals = "recorded" needs lengths = "recorded" and file')
        if self.arrivals != "closed" and not self.rate_per_s > 0:
            raise ValueError("rate_per_s must be above 0")
        if other := set(self.limits) - set(self.metrics):
            raise ValueError(f"limits has {min(other)}, which is not among metrics")
        has_limits = any((self.ttft_ms, self.tpot_ms, self.e2e_ms))
        if any(metric.name == "goodput" for metric in known) and not has_limits:
            raise ValueError("goodput needs ttft_ms, tpot_ms or e2e_ms")
        return self

    @property
    def judged(self) -> tuple[Metric, ...]:
        """The metrics, each with a limit."""
        return tuple(metric(name) for name in dict.fromkeys(self.metrics))

    @property
    def latency_limits(self) -> LatencyLimits:
        return LatencyLimits(self.ttft_ms, self.tpot_ms, self.e2e_ms)

    def limit_of(self, of: Metric) -> float:
        """Return the largest accepted loss of a metric, percent."""
        return self.limits.get(of.name, self.worse_percent)

    def segment(self, trace: list[PlannedRequest], number: int, seed: int) -> list[PlannedRequest]:
        """Return the requests of a segment. trace: the recorded one; empty: lengths are drawn."""
        count = self.requests
        if self.lengths == "recorded":
            start = number * count
            chosen = [trace[(start + i) % len(trace)] for i in range(count)]
            if start // len(trace) != (start + count - 1) // len(trace):
                chosen = trace[:count] if len(trace) >= count else chosen
        elif self.lengths == "fixed":
            chosen = fixed_lengths(count, self.prompt_tokens, self.new_tokens)
        else:
            chosen = sharegpt_lengths(count, self.longest, seed)
        return with_arrivals(chosen, self.arrivals, self.rate_per_s, seed)

    def beside(self, folder: Path | None) -> SpeedTable:
        """Return the table with the path of its file, which is relative to the policy's folder."""
        if folder is None or not self.file:
            return self
        return self.model_copy(update={"file": str(folder / Path(self.file).expanduser())})

    def recorded(self) -> list[PlannedRequest]:
        """Return the requests of the file; empty: the table has none. Raises UsageError."""
        return read_trace(self.file) if self.file else []

    def case(self, model: str, of: Metric) -> Case:
        """Return the case of a metric: the kernel is the model's name, as series have it."""
        lengths: dict[str, Value] = {
            "fixed": {"prompt": self.prompt_tokens, "new": self.new_tokens},
            "sharegpt": {"longest": self.longest},
            "recorded": {},
        }[self.lengths]  # type: ignore[assignment]  # of the three dictionaries' common type
        arrivals = f"{self.arrivals}-"
        arrivals += str(self.concurrency) if self.arrivals == "closed" else f"{self.rate_per_s:g}"
        values: dict[str, Value] = {
            "load": self.name,
            "lengths": self.lengths,
            **lengths,
            "arrivals": arrivals,
            "requests": self.requests,
            "metric": of.name,
        }
        kernel = _KERNEL.sub("-", model.lower()).strip("-.") or "model"
        workload = OperationWorkload(SERVING, tuple(values.items()))
        return Case(kernel, workload, stage="op", cache="hot")
