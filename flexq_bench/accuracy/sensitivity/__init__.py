"""Sensitivity of a model's layers to quantization, and a budget of 8-bit activations.

`kind_sensitivities` measures the perplexity with one kind of layer quantized at a time.
`try_budget` chooses the layers that gain most from more bits
(`flexq_bench.schemes.layer_sensitivity`) and evaluates the choice. `write_figure` draws both.
"""

from flexq_bench.accuracy.sensitivity.budget import BudgetReport, Choice, try_budget
from flexq_bench.accuracy.sensitivity.figure import write_figure
from flexq_bench.accuracy.sensitivity.layer_kinds import (
    ALL_KINDS,
    Bits,
    KindSensitivity,
    OnStep,
    OwnSetting,
    kind_sensitivities,
)
from flexq_bench.accuracy.sensitivity.restoring import restoring

__all__ = [
    "ALL_KINDS",
    "Bits",
    "BudgetReport",
    "Choice",
    "KindSensitivity",
    "OnStep",
    "OwnSetting",
    "kind_sensitivities",
    "restoring",
    "try_budget",
    "write_figure",
]
