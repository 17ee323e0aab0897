"""User-defined schemes: a function from weights and input statistics to codes and scales.

    from flexq_bench.schemes import own_scheme

    @own_scheme("mine-w4a8", w_bits=4, group=128, a_bits=8, calibrated=True)
    def mine(weight, statistics):
        ...
        return codes, scales

`--schemes-from FILE` loads such a file. A package names the decorated function, or its module, in
the entry point group `flexq_bench.schemes`. The name works like that of any other scheme, including
`+kv8`. The layers run on the kernel of their formats, if there is one.
"""

from __future__ import annotations

import os
import runpy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from flexq_bench.errors import one_line
from flexq_bench.kernels.errors import ShapeError
from flexq_bench.kernels.formats import NumberFormat, Operand
from flexq_bench.kernels.formats.symmetric_quantization import code_limits
from flexq_bench.schemes.activations import dynamic
from flexq_bench.schemes.calibration import Statistics
from flexq_bench.schemes.errors import QuantizeError
from flexq_bench.schemes.fake_quantization import quantize_site
from flexq_bench.schemes.layer_formats import LayerFormats
from flexq_bench.schemes.model_map import LinearSite, weight_of
from flexq_bench.schemes.scheme import QuantizationState, Scheme, SchemeOptions
from flexq_bench.schemes.site_inputs import observe_block, readers_of
from flexq_bench.schemes.uniform import uniform_format

GROUP = "flexq_bench.schemes"  # of entry points
FROM_FILES = "FLEXQ_BENCH_SCHEMES_FROM"  # files, inherited by child processes
_NAME_LIMITS = frozenset("[]+, \t\n")


@dataclass(frozen=True, slots=True)
class LayerStatistics:
    """Statistics of each channel of a layer's inputs, over the tokens of the calibration.

    absmax, mean_abs, mean_square: [K], FP32. hessian: [K, K], FP32, the mean of x xᵀ; None: not
    requested. tokens: number of tokens.
    """

    absmax: torch.Tensor
    mean_abs: torch.Tensor
    mean_square: torch.Tensor
    hessian: torch.Tensor | None
    tokens: int


Codes = tuple[torch.Tensor, torch.Tensor]
Quantize = Callable[[torch.Tensor, LayerStatistics | None], Codes]


@dataclass(frozen=True, slots=True)
class OwnScheme:
    """A function with the formats of its result: an entry of the registry.

    quantize: called with a layer's weight, FP32 [N, K], and statistics (None: not calibrated);
    returns integer codes [N, K] within -2^(w_bits-1) … 2^(w_bits-1) - 1 and scales [N, ceil(K /
    group)]. group: values along K that share a scale; None: a row. a_bits: of inputs, rounded token
    by token in groups of a_group (None: of group); 16: not rounded.
    """

    name: str
    quantize: Quantize
    w_bits: int
    group: int | None
    a_bits: int
    a_group: int | None
    calibrated: bool
    hessian: bool
    version: int
    source: str

    @property
    def weight_format(self) -> NumberFormat:
        return NumberFormat(self.w_bits, self.group)

    def __call__(self, weight: torch.Tensor, statistics: LayerStatistics | None) -> Codes:
        """Call the function itself."""
        return self.quantize(weight, statistics)

    def operand(
        self, weight: torch.Tensor, statistics: LayerStatistics | None, layer: str
    ) -> Operand:
        """Return checked codes of a weight [N, K]. Raises QuantizeError that names the layer."""
        with _reporting(f"{self.name}: {layer}"):
            returned = self.quantize(weight, statistics)
        try:
            codes, scales = returned
            return self._checked(codes, scales, tuple(weight.shape))
        except (ShapeError, TypeError, ValueError, AttributeError) as error:
            raise QuantizeError(f"{self.name}: {layer}: {error}") from error

    def _checked(self, codes: Any, scales: Any, shape: tuple[int, ...]) -> Operand:
        if not (isinstance(codes, torch.Tensor) and isinstance(scales, torch.Tensor)):
            raise ValueError("return two tensors, codes and scales")
        if tuple(codes.shape) != shape or codes.is_floating_point():
            raise ValueError(
                f"codes must be integers {list(shape)}, got {codes.dtype} {list(codes.shape)}"
            )
        low, high = code_limits(self.w_bits)
        if int(codes.min()) < low or int(codes.max()) > high:
            raise ValueError(
                f"codes of {self.w_bits} bits lie within {low} … {high}, got {int(codes.min())} … "
                f"{int(codes.max())}"
            )
        halves = scales.to(torch.float16)
        if not bool(torch.isfinite(halves).all()):
            raise ValueError("scales must be finite in FP16")
        return Operand(codes.to(torch.int8), halves, self.w_bits, self.group)


def own_scheme(
    name: str,
    *,
    w_bits: int,
    group: int | None = None,
    a_bits: int = 16,
    a_group: int | None = None,
    calibrated: bool = False,
    hessian: bool = False,
    version: int = 1,
    source: str = "",
) -> Callable[[Quantize], OwnScheme]:
    """Decorator that turns a function into a scheme. Arguments as of OwnScheme.

    calibrated: it needs statistics; hessian: it also needs second moments. version: to be increased
    when the same weights give other codes. Raises QuantizeError for invalid bits or an invalid
    name.
    """
    if not name or _NAME_LIMITS & set(name):
        raise QuantizeError(f"a scheme can't be called {name!r}: no brackets, commas, + or blanks")
    if not (2 <= w_bits <= 8 and (2 <= a_bits <= 8 or a_bits == 16)):
        raise QuantizeError(
            f"{name}: weights have 2 to 8 bits and inputs 2 to 8 or 16, got {w_bits} and {a_bits}"
        )

    def decorate(function: Quantize) -> OwnScheme:
        return OwnScheme(
            name, function, w_bits, group, a_bits, group if a_group is None else a_group,
            calibrated or hessian, hessian, version, source or "own scheme",
        )  # fmt: skip

    return decorate


class OwnSchemeLoop(Scheme):
    """Applies a user's function to the layers of a model."""

    source = "own scheme"

    def __init__(self, name: str, options: SchemeOptions, own: OwnScheme) -> None:
        super().__init__(name, options)
        self.own = own

    @property
    def needs_calibration(self) -> bool:
        return self.own.calibrated

    def layer_formats(self, kind: str, gated: bool) -> LayerFormats:
        return LayerFormats(self.own.weight_format, self._activation_format)

    def quantize_block(self, state: QuantizationState, block: int) -> None:
        statistics = None
        if self.own.calibrated:
            statistics = Statistics(hessian=self.own.hessian)
            observe_block(state, block, statistics)
        statistics_key = {
            reader.name: readers[0].name
            for site_input in state.layout.inputs_of(block)
            if (readers := readers_of(state, block, site_input))
            for reader in readers
        }
        for site in state.layout.of_block(block):
            layer_statistics = (
                None if statistics is None else _of_layer(statistics, statistics_key[site.name])
            )
            self.quantize_layer(state.model, site, layer_statistics)

    def quantize_layer(
        self, model: nn.Module, site: LinearSite, statistics: LayerStatistics | None
    ) -> None:
        """Replace a layer by the codes that the function returns for it."""
        weight = weight_of(model, site).detach().float().clone()
        operand = self.own.operand(weight, statistics, site.name)
        quantize_site(model, site, operand, dynamic(self._activation_format))

    @property
    def _activation_format(self) -> NumberFormat:
        return uniform_format(self.own.a_bits, self.own.a_group)


def scheme_of(own: OwnScheme, name: str, options: SchemeOptions) -> Scheme:
    """Return the Scheme of a user-defined scheme; its class has the version and the source."""
    parts = {"version": own.version, "source": own.source}
    kind: type[OwnSchemeLoop] = type(own.name, (OwnSchemeLoop,), parts)
    return kind(name, options, own)


_loaded: dict[tuple[str, str], tuple[OwnScheme, ...]] = {}


def use_schemes_from(file: str | os.PathLike[str]) -> tuple[str, ...]:
    """Add the schemes of a Python file, also in child processes; returns their names.

    Raises QuantizeError if there is no such file, it fails, or it defines no own_scheme.
    """
    path = str(Path(file).expanduser().resolve())
    schemes = _of_file(path)
    paths = [entry for entry in os.environ.get(FROM_FILES, "").split(os.pathsep) if entry]
    if path not in paths:
        os.environ[FROM_FILES] = os.pathsep.join((*paths, path))
    return tuple(own.name for own in schemes)


def own_schemes() -> dict[str, OwnScheme]:
    """Return user-defined schemes by name: of files, then of installed packages.

    Raises QuantizeError as use_schemes_from, and if two have the same name.
    """
    by_name: dict[str, OwnScheme] = {}
    for own in _all():
        if by_name.setdefault(own.name, own) is not own:
            raise QuantizeError(f"two own schemes are called {own.name}: rename one of them")
    return by_name


def _all() -> Iterator[OwnScheme]:
    for path in dict.fromkeys(filter(None, os.environ.get(FROM_FILES, "").split(os.pathsep))):
        yield from _of_file(path)
    for point in metadata.entry_points(group=GROUP):
        yield from _of_entry_point(point)


@contextmanager
def _reporting(where: str) -> Iterator[None]:
    """Convert any exception of a user's code, also an exit, to a QuantizeError."""
    try:
        yield
    except (Exception, SystemExit) as error:
        raise QuantizeError(f"{where}: {type(error).__name__}: {one_line(error)}") from error


def _of_file(path: str) -> tuple[OwnScheme, ...]:
    if ("file", path) not in _loaded:
        if not Path(path).is_file():
            raise QuantizeError(f"no file {path}: --schemes-from takes a Python file")
        with _reporting(path):
            values = runpy.run_path(path)
        _loaded["file", path] = _schemes_among(values.values(), path)
    return _loaded["file", path]


def _of_entry_point(point: metadata.EntryPoint) -> tuple[OwnScheme, ...]:
    key = "entry point", f"{point.name} = {point.value}"
    if key not in _loaded:
        with _reporting(f"entry point {key[1]}"):
            value = point.load()
        values = vars(value).values() if isinstance(value, ModuleType) else [value]
        _loaded[key] = _schemes_among(values, f"entry point {key[1]}")
    return _loaded[key]


def _schemes_among(values: Any, where: str) -> tuple[OwnScheme, ...]:
    schemes = tuple({id(v): v for v in values if isinstance(v, OwnScheme)}.values())
    if not schemes:
        raise QuantizeError(
            f"{where} has no scheme: decorate a function with flexq_bench.schemes.own_scheme"
        )
    return schemes


def _of_layer(statistics: Statistics, name: str) -> LayerStatistics:
    count = statistics.count[name]
    moments = statistics.hessian.get(name)
    return LayerStatistics(
        statistics.absmax[name].float(),
        (statistics.abs_sum[name] / count).float(),
        (statistics.square_sum[name] / count).float(),
        None if moments is None else (moments / count).float(),
        count,
    )
