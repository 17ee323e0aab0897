"""Schemes of a user's own: a function from weights and statistics of inputs to codes and scales.

    from flexq_bench.schemes import own_scheme

    @own_scheme("mine-w4a8", w_bits=4, group=128, a_bits=8, calibrated=True)
    def mine(weight, statistics):
        ...
        return codes, scales

`--schemes-from FILE` takes such a file; a package names the decorated function, or the module that
has it, in the entry point group `flexq_bench.schemes`. The registry resolves its name like any
other, `+kv8` included, and the layers run through the kernel of their formats where there is one.
"""

from __future__ import annotations

import os
import runpy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from flexq_bench.errors import one_line
from flexq_bench.schemes.activations import DynamicActivation
from flexq_bench.schemes.calibration import Statistics
from flexq_bench.schemes.errors import QuantizeError
from flexq_bench.schemes.fake_quantization import quantize_site
from flexq_bench.schemes.layer_formats import LayerFormats
from flexq_bench.schemes.model_map import LinearSite, weight_of
from flexq_bench.schemes.scheme import QuantizationState, Scheme, SchemeOptions
from flexq_bench.schemes.site_inputs import observe_block, readers_of
from flexq_bench.schemes.uniform import uniform_format
from kernels.errors import ShapeError
from kernels.formats import FP16, NumberFormat, Operand
from kernels.formats.symmetric_quantization import code_limits

GROUP = "flexq_bench.schemes"  # of entry points
FROM_FILES = "FLEXQ_BENCH_SCHEMES_FROM"  # files, so that processes that are started know them too
_NAME_LIMITS = frozenset("[]+, \t\n")


@dataclass(frozen=True, slots=True)
class LayerStatistics:
    """Inputs that calibration showed a layer: of each channel, over the tokens.

    absmax, mean_abs, mean_square: [K], FP32. hessian: [K, K], FP32, the mean of x xᵀ; None: not
    asked for. tokens: how many were seen.
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
    """A function with the formats of what it returns; the registry's entry.

    quantize: gets a layer's weight, FP32 [N, K], and statistics (None: not calibrated); returns
    integer codes [N, K] within -2^(w_bits-1) … 2^(w_bits-1) - 1 and scales [N, ceil(K / group)].
    group: values along K that share a scale; None: a row. a_bits: of inputs, rounded token by token
    in groups of a_group (None: of group); 16: not rounded.
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
        """The function itself."""
        return self.quantize(weight, statistics)

    def operand(
        self, weight: torch.Tensor, statistics: LayerStatistics | None, layer: str
    ) -> Operand:
        """Codes of a weight [N, K], checked. Raises QuantizeError in one line, with the layer."""
        try:
            returned = self.quantize(weight, statistics)
        except (Exception, SystemExit) as error:  # a user's function may raise anything
            reason = f"{type(error).__name__}: {one_line(error)}"
            raise QuantizeError(f"{self.name}: {layer}: {reason}") from error
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
    """Decorator that makes a scheme of a function. Arguments as of OwnScheme.

    calibrated: it needs statistics; hessian: the second moments too. version: raised when the same
    weights start to give other codes. Raises QuantizeError for bits or a name that can't be.
    """
    if not name or _NAME_LIMITS & set(name):
        raise QuantizeError(f"a scheme can't be called {name!r}: no brackets, commas, + or blanks")
    if not (2 <= w_bits <= 8 and (2 <= a_bits <= 8 or a_bits == 16)):
        raise QuantizeError(
            f"{name}: weights have 2 to 8 bits and inputs 2 to 8 or 16, got {w_bits} and {a_bits}"
        )

    def made(function: Quantize) -> OwnScheme:
        return OwnScheme(
            name, function, w_bits, group, a_bits, group if a_group is None else a_group,
            calibrated or hessian, hessian, version, source or "own scheme",
        )  # fmt: skip

    return made


class OwnSchemeLoop(Scheme):
    """Runs a user's function over the layers of a model."""

    source = "own scheme"

    def __init__(self, name: str, options: SchemeOptions, own: OwnScheme) -> None:
        super().__init__(name, options)
        self.own = own

    @property
    def needs_calibration(self) -> bool:
        return self.own.calibrated

    def layer_formats(self, kind: str, gated: bool) -> LayerFormats:
        return LayerFormats(self.own.weight_format, self._activation_format())

    def quantize_block(self, state: QuantizationState, block: int) -> None:
        statistics = None
        if self.own.calibrated:
            statistics = Statistics(hessian=self.own.hessian)
            observe_block(state, block, statistics)
        seen_by = {
            reader.name: readers[0].name
            for site_input in state.layout.site_inputs
            if (readers := readers_of(state, block, site_input))
            for reader in readers
        }
        for site in state.layout.of_block(block):
            seen = None if statistics is None else _of_layer(statistics, seen_by[site.name])
            self.quantize_layer(state.model, site, seen)

    def quantize_layer(
        self, model: nn.Module, site: LinearSite, statistics: LayerStatistics | None
    ) -> None:
        """Put the codes that the function makes of a layer where it is."""
        number = self._activation_format()
        activation = DynamicActivation(number) if self.own.a_bits < 16 else None
        weight = weight_of(model, site).detach().float().clone()
        quantize_site(model, site, self.own.operand(weight, statistics, site.name), activation)

    def _activation_format(self) -> NumberFormat:
        if self.own.a_bits == 16:
            return FP16
        return uniform_format(self.own.a_bits, self.own.a_group)


def scheme_of(own: OwnScheme, name: str, options: SchemeOptions) -> Scheme:
    """The Scheme of an own scheme; its class has the version and the source."""
    parts = {"version": own.version, "source": own.source}
    kind: type[OwnSchemeLoop] = type(own.name, (OwnSchemeLoop,), parts)
    return kind(name, options, own)


_loaded: dict[tuple[str, str], tuple[OwnScheme, ...]] = {}


def use_schemes_from(file: str | os.PathLike[str]) -> tuple[str, ...]:
    """Add the schemes of a Python file, here and in processes that are started; their names.

    Raises QuantizeError if there is no such file, it fails, or it has no own_scheme.
    """
    path = str(Path(file).expanduser().resolve())
    own_schemes = _of_file(path)
    known = [one for one in os.environ.get(FROM_FILES, "").split(os.pathsep) if one]
    if path not in known:
        os.environ[FROM_FILES] = os.pathsep.join((*known, path))
    return tuple(own.name for own in own_schemes)


def own_schemes() -> dict[str, OwnScheme]:
    """By name: of files that use_schemes_from named, then of installed packages.

    Raises QuantizeError as use_schemes_from, and if two have one name.
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


def _of_file(path: str) -> tuple[OwnScheme, ...]:
    if ("file", path) not in _loaded:
        if not Path(path).is_file():
            raise QuantizeError(f"no file {path}: --schemes-from takes a Python file")
        try:
            values = runpy.run_path(path)
        except (Exception, SystemExit) as error:  # a user's file may raise anything
            reason = f"{type(error).__name__}: {one_line(error)}"
            raise QuantizeError(f"{path}: {reason}") from error
        _loaded["file", path] = _schemes_among(values.values(), path)
    return _loaded["file", path]


def _of_entry_point(point: metadata.EntryPoint) -> tuple[OwnScheme, ...]:
    key = "entry point", f"{point.name} = {point.value}"
    if key not in _loaded:
        try:
            value = point.load()
        except (Exception, SystemExit) as error:  # another package's import may, too
            reason = f"{type(error).__name__}: {one_line(error)}"
            raise QuantizeError(f"entry point {key[1]}: {reason}") from error
        values = vars(value).values() if isinstance(value, ModuleType) else [value]
        _loaded[key] = _schemes_among(values, f"entry point {key[1]}")
    return _loaded[key]


def _schemes_among(values: Any, where: str) -> tuple[OwnScheme, ...]:
    own_schemes = tuple({id(v): v for v in values if isinstance(v, OwnScheme)}.values())
    if not own_schemes:
        raise QuantizeError(
            f"{where} has no scheme: decorate a function with flexq_bench.schemes.own_scheme"
        )
    return own_schemes


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
