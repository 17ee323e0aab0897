"""Options that narrow a suite to some of its cases."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import Annotated

from flexq_bench.cli.external import known_patterns
from flexq_bench.cli.options import KernelsOption, case_option
from flexq_bench.packages import require_extra
from flexq_bench.sweeps.text import parameter_limits, split_names, split_sizes
from flexq_bench.workloads.model_spec import LayerShape
from flexq_bench.workloads.suite import Suite


def layers_of_option(verb: str, config: str, names: str) -> tuple[LayerShape, ...]:
    """Return the layers of a Hugging Face configuration. names: of layers, or fused."""
    require_extra("models", f"{verb} --config")

    from flexq_bench.model_configs.layers import chosen_layers, layers_of_config

    return chosen_layers(layers_of_config(config), split_names(names) or ())


@dataclass(frozen=True)
class CaseOptions:
    """Restrictions of a suite's cases; None: not restricted."""

    models: Annotated[
        str | None,
        case_option(metavar="NAMES", help="Only these models' layers."),
    ] = None
    m: Annotated[
        str | None,
        case_option(metavar="RANGES", help="Only these M: 1,4 or 1:8 or 4:64:x2."),
    ] = None
    kernels: KernelsOption = None
    layers: Annotated[str | None, case_option(metavar="NAMES", help="Only these layers.")] = None
    stage: Annotated[
        str | None, case_option(metavar="STAGES", help="Only gemm, or only linear.")
    ] = None
    operation: Annotated[
        str | None, case_option(metavar="NAMES", help="Only these operations: linear, …")
    ] = None
    parameter: Annotated[
        list[str] | None,
        case_option(metavar="NAME=VALUES", help="Only these parameters: heads=32, context=1024:."),
    ] = None
    cache: Annotated[str | None, case_option(metavar="MODES", help="Only cold, or only hot.")] = (
        None
    )

    def __post_init__(self) -> None:
        """Raise UsageError or WorkloadError for a text that can't be parsed."""
        split_sizes(self.m)
        for text in (self.models, self.kernels, self.layers, self.stage, self.cache):
            split_names(text)
        split_names(self.operation)
        parameter_limits(self.parameter)

    @property
    def is_empty(self) -> bool:
        """True if no option is given."""
        return not any(value for value in astuple(self))

    @property
    def patterns(self) -> tuple[str, ...] | None:
        """Labels and globs of --kernels, without those of sources that failed to load."""
        return known_patterns(split_names(self.kernels))

    def restrict(self, suite: Suite) -> Suite:
        """Return the selected cases of a suite. Raises UsageError, WorkloadError."""
        return suite.restrict(
            m=split_sizes(self.m),
            models=split_names(self.models),
            layers=split_names(self.layers),
            kernels=self.patterns,
            stages=split_names(self.stage),
            caches=split_names(self.cache),
            operations=split_names(self.operation),
            parameters=parameter_limits(self.parameter),
        )
