"""Distances between a model's weights and the original's, by row and layer.

The unit is a quantization step of the row: sqrt(12) times the error of rounding the original's row
to nearest in the layer's own format, whose distance therefore is 0.29 steps, as that of uniform
numbers from their nearest integers. Learned roundings (GPTQ) and clipped ranges (AWQ) have larger
distances, but similar ones in all rows of a layer.

Schemes may multiply channels in one layer and divide them in the next. Such factors are accepted if
both sides agree; a weight is then compared with the original's times its factors. Weights in
another basis (QuaRot) can't be compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from flexq_bench.accuracy.artefacts.differences import Difference
from flexq_bench.decode.kernel_linear import KernelLinear
from flexq_bench.kernels.errors import ShapeError
from flexq_bench.kernels.formats import FP16, NumberFormat, quantize
from flexq_bench.schemes.channels import SiteInput
from flexq_bench.schemes.fake_quantization import FakeQuantizedLinear
from flexq_bench.schemes.model_map import LinearSite, ModelMap, map_model
from flexq_bench.schemes.quantized_layer import QuantizedLayer
from flexq_bench.schemes.smoothing import spread

_ROUNDED = 1 / math.sqrt(12)  # steps: distance of numbers that are rounded to nearest
# Bounds below are wider than every scheme of the registry needs, see docs/accuracy-gate.md.
_MAX_ROW_RATIO, _MIN_ROW_STEPS = 3.0, 0.6  # of a row to its layer's median; steps
_MAX_GROUP_RATIO, _MIN_GROUP_STEPS = 4.0, 1.0  # of a group to its layer's median row; steps
_MAX_LAYER_RATIO, _MIN_LAYER_STEPS = 6.0, 0.6  # of a learned layer to the model's; steps
_MAX_LAYER_OFFSET = 0.25  # steps: signed mean of a row, median of a layer
_MAX_ROW_SCALE, _MAX_LAYER_SCALE = 0.02, 0.01  # relative
_MAX_COLUMN_SCALE = 1.3
_MAX_CLIPPED = 1.5  # of the distance of a row whose range is clipped to its layer's median
_CLIPPED = 0.2  # of the relative error of rounding: the scale that clipped ranges may lose
_MIN_RANGE = 0.5  # of a group's range, that a scheme that clips it keeps: AWQ's smallest
_MIN_FACTOR = 2.0**-9  # from 1, of a factor that a scheme moved
_MAX_EQUAL = 2.0**-7  # relative: two roundings to BF16
_MAX_NEAREST = 0.35  # steps: of layers that were rounded to nearest
_MAX_ROUNDED = 0.35  # relative error of a row of an embedding: a format of 2 bits has 0.3
_MAX_SCALED = 0.1  # relative, of a bias whose factors are estimated
_LOST, _MAX_LOST = 4.0, 1e-4  # steps from 0, of values that are 0 now; their share of a layer
_SAME_CONTENT, _OTHER_CONTENT = 0.7, 0.5  # cosines
_DEVIATIONS = 5.0  # standard errors that a scale may be off by chance
_SKETCH = 4096  # values that identify a layer
_MAX_NAMED_ROWS = 8
_TIMES = "its weights are {:.3g} times the original's"
_UNLIKE = "{} unlike the original's"
_OTHER_BASIS = "its weights are in another basis (rotated), or those of another model"


@dataclass(frozen=True, slots=True)
class LayerDistance:
    """Distance of one layer. steps: median of its rows; worst: the largest; scale: relative size of
    the rows, median, 1 as the original's.
    """

    layer: str
    rows: int
    steps: float
    worst: float
    scale: float


@dataclass(frozen=True, slots=True)
class WeightReport:
    """Result of a comparison of weights.

    layers: those that can be compared. findings: rows, layers and tensors that differ by more than
    the format explains; a name is `weights.` and that of the module. not_judged: the reason, by
    name of a layer or tensor.
    """

    layers: tuple[LayerDistance, ...]
    findings: tuple[Difference, ...]
    not_judged: Mapping[str, str]


@torch.no_grad()
def weight_distances(
    model: nn.Module,
    original: nn.Module,
    formats: Mapping[str, NumberFormat] = MappingProxyType({}),
) -> WeightReport:
    """Compare all weights of a model, quantized or not, with those of the original.

    Both have the same architecture and are on the same device. formats: see LoadedModel. Raises
    QuantizeError if it has no layer map.
    """
    return _Comparison(model, original, formats).report()


@dataclass(slots=True)
class _Rows:
    """One layer's rows [N]: steps, their signed mean (offset), scale (relative to rounding to
    nearest), the relative error that the scale does not explain, cosine; steps of the worst group
    of a row, in its own or the row's. columns: cosines [K] of those that are a step or more, 0 of
    those that are larger than the original's. lost: number of values that are 0, far from the
    original's.
    """

    steps: torch.Tensor
    offset: torch.Tensor
    scale: torch.Tensor
    noise: torch.Tensor
    cosine: torch.Tensor
    group_steps: torch.Tensor
    columns: torch.Tensor
    lost: int

    @property
    def k(self) -> int:
        """Values of a row."""
        return self.columns.numel()

    def explained(self) -> torch.Tensor:
        """Deviation of each row's scale from 1 that rounding explains."""
        return _MAX_ROW_SCALE + (_CLIPPED + _DEVIATIONS / math.sqrt(self.k)) * self.noise

    def unexplained_scale(self) -> float | None:
        """Return the median scale of the rows; None: rounding explains it."""
        scale = float(self.scale.median())
        deviations = _DEVIATIONS / math.sqrt(self.k * self.noise.numel())
        slack = (_CLIPPED + deviations) * float(self.noise.median())
        return scale if abs(scale - 1) > _MAX_LAYER_SCALE + slack else None


@dataclass(slots=True)
class _Factors:
    """Factors of the rows and columns of a layer, relative to the original's; None: ones."""

    rows: dict[str, torch.Tensor] = field(default_factory=dict)
    columns: dict[str, torch.Tensor] = field(default_factory=dict)


class _Comparison:
    def __init__(self, model: Any, original: Any, formats: Mapping[str, NumberFormat]) -> None:
        self._model, self._original, self._formats = model, original, formats
        self._layout: ModelMap = map_model(original)
        self._sites = {site.name: site for site in self._layout.sites}
        self._tensors: dict[str, torch.Tensor] = model.state_dict()
        coded = self._tensors.keys() & formats.keys()
        self._coded = {self._tensors[name].data_ptr() for name in coded}  # also of tied ones
        self._findings: list[Difference] = []
        self._not_judged: dict[str, str] = {}
        self._scaled_norms: set[str] = set()
        self._row_factors: dict[str, torch.Tensor] = {}
        self._dead: dict[str, torch.Tensor] = {}  # channels of a layer that are always 0

    def report(self) -> WeightReport:
        measured: dict[str, _Rows] = {}
        for block in range(self._layout.blocks):
            factors = self._factors_of(block)
            for site in self._layout.of_block(block):
                measured[site.name] = self._measured(site, factors)
        foreign = [name for name, rows in measured.items() if _is_other(rows)]
        homes = self._homes(foreign)
        if len(foreign) > len(measured) / 2 and len(homes) < len(foreign) / 2:
            self._findings.clear()  # factors of another basis mean nothing
            self._not_judged.update(dict.fromkeys(self._sites, _OTHER_BASIS))
            return WeightReport((), (), self._not_judged)
        exchanged = self._exchanged_blocks(homes)
        prefix = f"weights.{self._layout.path}."
        moved = tuple(f"{prefix}{block}." for block in exchanged)
        findings = [
            Difference(f"{prefix}{block}", f"it has the weights of the original's block {other}")
            for block, other in exchanged.items()
        ]
        typical = _median([float(rows.steps.median()) for rows in measured.values()])
        for name, rows in measured.items():
            self._findings += self._judged(name, rows, typical, homes.get(name))
        self._findings += self._others()
        findings += [f for f in self._findings if not f.name.startswith(moved or "\0")]
        layers = tuple(
            LayerDistance(
                name,
                rows.steps.numel(),
                float(rows.steps.median()),
                float(rows.steps.max()),
                float(rows.scale.median()),
            )
            for name, rows in measured.items()
        )
        return WeightReport(layers, tuple(findings), self._not_judged)

    def _exchanged_blocks(self, homes: Mapping[str, str]) -> dict[int, int]:
        """Blocks of which most layers are those of another block of the original."""
        exchanged = {}
        for block in range(self._layout.blocks):
            sites = self._layout.of_block(block)
            of = [self._sites[homes[site.name]].block for site in sites if site.name in homes]
            if of and of.count(of[0]) > len(sites) / 2 and of[0] != block:
                exchanged[block] = of[0]
        return exchanged

    # Factors that a scheme moved between layers.

    def _factors_of(self, block: int) -> _Factors:
        factors = _Factors()
        sites = {site.kind: site for site in self._layout.of_block(block)}
        base = f"{self._layout.path}.{block}"
        for site_input in self._layout.scalable_inputs(block):
            readers = [sites[kind] for kind in site_input.kinds]
            source = f"{base}.{site_input.source}"
            dead = self._always_zero(source, site_input)
            self._dead |= dict.fromkeys((r.name for r in readers), spread(dead, site_input))
            if site_input.through == "norm":
                own = self._norm_factor(source, site_input.norm_offset)
                if own is None:
                    continue
                self._scaled_norms.add(source)
            else:
                rows = self._measured(self._sites[source], factors, clips=False)
                own = rows.scale
                if not bool(((own - 1).abs() > rows.explained()).any()):
                    continue  # rounding alone
            self._balance(source, own, readers, site_input, factors)
        return factors

    def _always_zero(self, source: str, site_input: SiteInput) -> torch.Tensor:
        """Channels [N] of a source that are zero for any input: no reader's value counts."""
        module = self._original.get_submodule(source)
        weight, bias = module.weight, getattr(module, "bias", None)
        is_zero: torch.Tensor = (
            weight + site_input.norm_offset == 0 if weight.ndim == 1 else (weight == 0).all(1)
        )
        return is_zero if bias is None else is_zero & (bias == 0)

    def _norm_factor(self, source: str, offset: float) -> torch.Tensor | None:
        """A norm's factors over the original's; None: they are equal. offset: see SiteInput."""
        ours, theirs = (
            m.get_submodule(source).weight.float() + offset for m in (self._model, self._original)
        )
        if ours.shape != theirs.shape or _relative(ours, theirs) <= _MAX_EQUAL:
            return None
        return torch.where(theirs == 0, 1.0, ours / theirs)

    def _balance(
        self,
        source: str,
        own: torch.Tensor,
        readers: Sequence[LinearSite],
        site_input: SiteInput,
        factors: _Factors,
    ) -> None:
        """Accept factors of a source's channels that its readers undo; report the others."""
        changed = (own - 1).abs() > _MIN_FACTOR
        if not bool(changed.any()):
            return
        products, squares, sizes, steps = (torch.zeros_like(own) for _ in range(4))
        rows = 0
        for reader in readers:
            counts = ~self._dead[reader.name]
            ours, theirs = (w(reader.name) * counts for w in (self._own_basis, self._weight))
            if site_input.through == "norm":  # rows of a reader may have factors of their own
                ours, theirs = _without_row_factors(ours, theirs, theirs / own)
            if not len(ours):
                continue
            smallest = torch.where(ours == 0, torch.inf, ours.abs()).amin()
            steps = torch.maximum(steps, smallest)
            products += self._of_source((ours * theirs).sum(0), site_input)
            squares += self._of_source(theirs.square().sum(0), site_input)
            sizes += self._of_source(ours.square().sum(0), site_input)
            rows += len(ours)
        if not rows:  # no row of a reader is the original's, which each reader's finding says
            return
        # Least squares, and the error of the columns that this leaves, relative to what is found
        # and to what the source needs.
        of_readers = torch.where(squares > 0, products / squares.clamp(min=1e-30), 1 / own)
        fitted = products * of_readers
        rest = (sizes - fitted).clamp(min=0)
        slack = _CLIPPED + _DEVIATIONS / math.sqrt(rows)
        explained = _MAX_ROW_SCALE + slack * (rest / fitted.clamp(min=1e-30)).sqrt()
        needed = _MAX_ROW_SCALE + slack * own.abs() * (rest / squares.clamp(min=1e-30)).sqrt()
        needs, has = (squares / rows).sqrt() / own, (sizes / rows).sqrt()
        lost = torch.maximum(needs, has) < steps  # readers round it to zeros
        both = own * of_readers
        agrees = (_ln(both).abs() <= explained) | ((both - 1).abs() <= needed) | lost
        # If they disagree, the readers are right, so that the source is the one that is reported.
        is_scaled = _ln(of_readers).abs() > explained
        undone = torch.where(is_scaled & (of_readers > 0), 1 / of_readers, 1.0)
        accepted = torch.where(agrees, own, undone)
        if site_input.through == "linear":
            factors.rows[source] = self._row_factors[source] = accepted
        for reader in readers:
            factors.columns[reader.name] = spread(1 / accepted, site_input)
        odd = (changed & ~agrees).nonzero().flatten().tolist()
        if odd and site_input.through == "norm":
            self._findings.append(
                Difference(
                    f"weights.{source}",
                    f"{_named(odd, 'channel')} {float((own / accepted)[odd[0]]):.3g} times what "
                    "the layers that read it undo",
                )
            )

    def _of_source(self, values: torch.Tensor, site_input: SiteInput) -> torch.Tensor:
        """Sum values [K] of a reader's channels over those that read one channel of the source."""
        if site_input.shared_heads == 1:
            return values
        parts = values.view(-1, site_input.shared_heads, site_input.head_dim)
        return parts.sum(dim=1).flatten()

    # Distances of rows.

    def _weight(self, name: str) -> torch.Tensor:
        """The original's weight, FP32 [N, K]."""
        weight: torch.Tensor = self._original.get_submodule(name).weight.float()
        return weight

    def _own_basis(self, name: str) -> torch.Tensor:
        """The model's weight, FP32 [N, K], in the original's order and basis of channels."""
        module = self._model.get_submodule(name)
        layer, values = _layer_of(module), _stored_basis(module)
        if layer is None:
            return values
        if layer.weight.order is not None:
            ordered = torch.empty_like(values)
            ordered[:, layer.weight.order.long()] = values
            values = ordered
        return values if layer.rotation is None else layer.rotation.undo_in_weight(values)

    def _measured(self, site: LinearSite, factors: _Factors, *, clips: bool = True) -> _Rows:
        """Compare a layer. clips: with the original in our range, which needs known factors."""
        theirs = self._weight(site.name)
        if site.name in factors.rows:
            theirs = theirs * factors.rows[site.name][:, None]
        if site.name in factors.columns:
            theirs = theirs * factors.columns[site.name]
        dead = self._dead.get(site.name, torch.zeros_like(theirs[0], dtype=torch.bool))
        free = self._own_basis(site.name) * dead  # any value does
        theirs = torch.where(dead, free, theirs)
        module = self._model.get_submodule(site.name)
        layer, order = _layer_of(module), None
        number = FP16 if layer is None else layer.weight_format
        if number.is_dense:
            number = self._formats.get(f"{site.name}.weight", number)
        if layer is not None:
            order = layer.weight.order
            if layer.rotation is not None:
                theirs, free = (layer.rotation.apply_to_weight(x) for x in (theirs, free))
        try:
            if number.kind == "mixed":
                rounded = quantize(theirs, number, order=order).dequantize(torch.float32)
            if order is not None:
                theirs, free = (x[:, order.long()] for x in (theirs, free))
            if number.kind != "mixed":
                rounded = quantize(theirs, number).dequantize(torch.float32)
        except (ShapeError, ValueError):  # a format that nothing is rounded to here
            rounded = theirs
        ours, theirs, rounded = (x - free for x in (_stored_basis(module), theirs, rounded))
        if not clips:
            return _rows(ours, theirs, rounded, number.group)
        clip = partial(_clipped, ours=ours, group=number.group)
        return _rows(ours, theirs, rounded, number.group, clip)

    # Judgement.

    def _judged(
        self, name: str, rows: _Rows, typical: float, home: str | None
    ) -> Iterator[Difference]:
        key = f"weights.{name}"
        if home is not None:
            yield Difference(key, f"it has the weights of the original's {home}")
            return
        steps = float(rows.steps.median())
        if _is_other(rows):
            yield Difference(key, "its weights are unlike those of every layer of the original")
            return
        if (scale := rows.unexplained_scale()) is not None:
            yield Difference(key, _TIMES.format(scale))
            return
        offset = float(rows.offset.median())
        if abs(offset) > _MAX_LAYER_OFFSET:
            yield Difference(key, f"its weights are {offset:+.2g} steps off on average")
            return
        # GPTQ zeroes columns that its inputs never use, and changes others most.
        is_nearest = typical < _MAX_NEAREST
        ratio = 1.0 if is_nearest else _MAX_LAYER_RATIO
        if steps > max(_MIN_LAYER_STEPS, ratio * typical):
            yield Difference(
                key,
                f"its rows are {steps:.2g} steps from the original's, those of other layers "
                f"{typical:.2g}",
            )
            return
        far = rows.steps > max(_MIN_ROW_STEPS, _MAX_ROW_RATIO * steps)
        is_moved = bool((far & (rows.cosine < _OTHER_CONTENT)).any())
        unlike = rows.columns < (_OTHER_CONTENT if is_nearest else _OTHER_CONTENT / 2)
        unlike &= (rows.columns != 0) | is_nearest
        if bool(unlike.any()) and not is_moved:
            columns = unlike.nonzero().flatten().tolist()
            yield Difference(key, _UNLIKE.format(_named(columns, "column")))
            return
        # A clipped range shrinks rows, but hardly adds to their distance.
        off = ((rows.scale - 1).abs() > rows.explained()) & (rows.steps > _MAX_CLIPPED * steps)
        off |= rows.group_steps > _largest_group(steps)
        odd = (far | off).nonzero().flatten()
        if odd.numel():
            yield Difference(key, "; ".join(self._explained(name, rows, odd, steps)))
        elif rows.lost > 1 and rows.lost > _MAX_LOST * rows.steps.numel() * rows.k:
            yield Difference(key, f"{rows.lost:,} of its values are 0, the original's far from it")

    def _explained(
        self, name: str, rows: _Rows, odd: torch.Tensor, typical: float
    ) -> Iterator[str]:
        """Describe rows: those that hold another row, those that are scaled, and the others."""
        foreign = odd[rows.cosine[odd] < _OTHER_CONTENT]
        held = _nearest_rows(self._own_basis(name)[foreign], self._weight(name))
        for row, other in list(zip(foreign.tolist(), held, strict=True))[:_MAX_NAMED_ROWS]:
            steps = float(rows.steps[row])
            holds = "" if other is None else f"has the original's row {other}, "
            yield f"row {row} {holds}{steps:.3g} steps from its own"
        rest = [row for row in odd.tolist() if row not in set(foreign.tolist())]
        for row in rest[:_MAX_NAMED_ROWS]:
            steps, scale = float(rows.steps[row]), float(rows.scale[row])
            group = float(rows.group_steps[row])
            if group > _largest_group(typical) and group > steps:
                yield f"row {row} is {group:.3g} steps off in one of its groups"
            else:
                yield f"row {row} is {steps:.3g} steps off, {scale:.3g} times the original's"
        yield f"{odd.numel()} of {rows.steps.numel()} rows; its median is {typical:.2g} steps"

    def _homes(self, foreign: Sequence[str]) -> dict[str, str]:
        """For layers that are unlike their original: the layer of the original they are like."""
        homes: dict[str, str] = {}
        sketches: dict[str, torch.Tensor] = {}
        for name in foreign:
            site = self._sites[name]
            ours = _sketch(self._own_basis(name))
            for other in self._layout.sites:
                if (other.n, other.k) != (site.n, site.k) or other.name == name:
                    continue
                if other.name not in sketches:
                    sketches[other.name] = _sketch(self._weight(other.name))
                if float(_cosine(ours, sketches[other.name])) > _SAME_CONTENT:
                    homes[name] = other.name
                    break
        return homes

    # Tensors outside the layers.

    def _others(self) -> Iterator[Difference]:
        # The state: parameters, and buffers such as the biases of a router.
        seen: set[int] = set()
        for name, theirs in self._original.state_dict().items():
            module, _, part = name.rpartition(".")
            if module in self._sites:
                if part == "bias":
                    yield from self._bias(module, theirs)
                continue
            if module in self._scaled_norms or name not in self._tensors:
                continue
            ours = self._tensors[name]
            places = {theirs.data_ptr(), ours.data_ptr()}
            if places <= seen:
                continue  # tied in both
            seen |= places
            if ours.shape != theirs.shape:
                yield Difference(f"weights.{module}", f"{part} has another shape")
            elif theirs.ndim == 2:
                is_coded = ours.data_ptr() in self._coded
                yield from self._matrix(module, ours.float(), theirs.float(), is_coded=is_coded)
            elif (change := _relative(ours.float(), theirs.float())) > _MAX_EQUAL:
                yield Difference(f"weights.{module}", f"{part} differs by {100 * change:.2g} %")

    def _bias(self, module: str, theirs: torch.Tensor) -> Iterator[Difference]:
        own = self._model.get_submodule(module)
        layer = _layer_of(own)
        ours = own.bias if layer is None else layer.bias
        factor = self._row_factors.get(module)
        expected = theirs.float() if factor is None else theirs.float() * factor
        change = _relative(torch.zeros_like(expected) if ours is None else ours.float(), expected)
        if change > (_MAX_EQUAL if factor is None else _MAX_SCALED):
            yield Difference(f"weights.{module}", f"its bias differs by {100 * change:.2g} %")

    def _matrix(
        self, module: str, ours: torch.Tensor, theirs: torch.Tensor, *, is_coded: bool
    ) -> Iterator[Difference]:
        """Compare an embedding, head or router by rows. is_coded: it may be rounded."""
        if torch.equal(ours, theirs):
            return
        rows = _rows(ours, theirs, theirs)
        errors = (ours - theirs).norm(dim=1) / theirs.norm(dim=1).clamp(min=1e-12)
        typical = float(errors.median())
        if _is_other(rows) or typical > _MAX_ROUNDED:
            yield Difference(f"weights.{module}", f"its rows differ by {100 * typical:.2g} %")
            return
        columns = (rows.columns < _OTHER_CONTENT).nonzero().flatten().tolist()
        if columns:
            yield Difference(f"weights.{module}", _UNLIKE.format(_named(columns, "column")))
            return
        if (scale := rows.unexplained_scale()) is not None:
            yield Difference(f"weights.{module}", _TIMES.format(scale))
            return
        largest = max(_MAX_EQUAL, _MAX_ROW_RATIO * typical if is_coded else 0.0)
        odd = (errors > largest).nonzero().flatten()
        # Padding of a vocabulary has rows of nearly zero, which formats round to zero.
        odd = odd[theirs[odd].norm(dim=1) > 0.01 * theirs.norm(dim=1).median()]
        if odd.numel():
            named = odd[:_MAX_NAMED_ROWS]
            held = _nearest_rows(ours[named], theirs)
            parts = [
                f"row {row} has the original's row {other}"
                if other is not None and other != row
                else f"row {row} differs by {100 * float(errors[row]):.2g} %"
                for row, other in zip(named.tolist(), held, strict=True)
            ]
            yield Difference(
                f"weights.{module}",
                f"{odd.numel()} of {len(errors)} rows: {', '.join(parts)}",
            )


def _largest_group(typical: float) -> float:
    """The distance of a group from which on its row is named. typical: of the layer's rows."""
    return max(_MIN_GROUP_STEPS, _MAX_GROUP_RATIO * typical)


def _layer_of(module: nn.Module) -> QuantizedLayer | None:
    """The codes of a quantized layer; None: it is not quantized."""
    return module.layer if isinstance(module, FakeQuantizedLinear | KernelLinear) else None


def _stored_basis(module: nn.Module) -> torch.Tensor:
    """A layer's weight as evaluated, FP32 [N, K], in the order and basis of its codes."""
    if isinstance(module, KernelLinear):
        return module.layer.weight.dequantize(torch.float32)
    assert isinstance(module.weight, torch.Tensor)  # of every linear layer
    return module.weight.float()


def _clipped(theirs: torch.Tensor, *, ours: torch.Tensor, group: int | None) -> torch.Tensor:
    """Clip each group of the original's rows [N, K] to the range of ours.

    A scheme that clips ranges (AWQ) leaves all values but the largest as they are. It keeps at
    least _MIN_RANGE of a range, so that zeroed groups stay different.
    """
    width = _width(theirs.shape[1], group)
    own, other = (x.reshape(-1, width) for x in (ours, theirs))
    low = torch.minimum(own.amin(1), _MIN_RANGE * other.amin(1))[:, None]
    high = torch.maximum(own.amax(1), _MIN_RANGE * other.amax(1))[:, None]
    return other.clamp(low, high).view_as(theirs)


def _rows(
    ours: torch.Tensor,
    theirs: torch.Tensor,
    rounded: torch.Tensor,
    group: int | None = None,
    clip: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.clone,
) -> _Rows:
    """Compare rows [N, K]. rounded: the original's in the format of ours, in groups of this size.

    clip: to the range of ours.
    """
    k, clipped = theirs.shape[1], clip(theirs)
    ours_off, rounded_off = ours - clipped, rounded - theirs
    squares, clipped_squares = _dots(theirs, theirs), _dots(clipped, clipped)
    size = (squares / k).sqrt()
    step = (_dots(rounded_off, rounded_off) / k).sqrt() / _ROUNDED
    floor = size / 2**8  # a step of BF16
    step = torch.maximum(step, floor)
    step = torch.where(step > 0, step, step.median().clamp(min=1e-12))
    zero = size == 0
    lengths = (_dots(ours, ours) * squares).sqrt()
    cosine = torch.where(zero, 1.0, _dots(ours, theirs) / lengths.clamp(min=1e-30))
    wrong, along = _dots(ours_off, ours_off), _dots(ours_off, clipped)
    beside = along / clipped_squares.clamp(min=1e-30)  # slope - 1, of which little is lost
    slopes = 1 + beside
    # Of rounding itself, which may clip (MXFP4), or not in a range that the scheme clips.
    scale, within = (
        slopes / (1 + _dots(off, base) / _dots(base, base).clamp(min=1e-30))
        for off, base in ((rounded_off, theirs), (clip(rounded) - clipped, clipped))
    )
    scale = torch.where(_ln(within).abs() < _ln(scale).abs(), within, scale)
    rest = ((wrong - beside * along).clamp(min=0) / k).sqrt()
    noise = torch.where(zero, 0.0, rest / size.clamp(min=1e-30))
    scale = torch.nan_to_num(torch.where(zero, 1.0, scale), 1.0)
    own, other = ours / step[:, None], theirs / step[:, None]  # so that each row counts
    of_own, of_other, of_both = (
        torch.linalg.vecdot(x, y, dim=0) for x, y in ((own, own), (other, other), (own, other))
    )
    columns = of_both / (of_own * of_other).sqrt().clamp(min=1e-30)
    # Clipping shrinks columns, and nothing makes them larger.
    columns = torch.where(of_both > _MAX_COLUMN_SCALE * of_other, 0.0, columns)
    columns = torch.where(of_other >= len(step), columns, 1.0)
    # A column of zeros is another finding, or one that no input uses.
    lost = ((own == 0) & (own != 0).any(0) & (other.abs() > _LOST)).sum()
    steps, offset = (wrong / k).sqrt() / step, ours_off.mean(1) / step
    width = _width(k, group)
    off, needed = (x.view(len(x), -1, width) for x in (ours_off, rounded_off))
    own_step = needed.square().mean(2).sqrt() / _ROUNDED
    group_steps = (off.square().mean(2).sqrt() / torch.maximum(own_step, step[:, None])).amax(1)
    return _Rows(steps, offset, scale, noise, cosine, group_steps, columns, int(lost))


def _width(k: int, group: int | None) -> int:
    """Values of K that share a scale; all if groups don't divide it."""
    return k if group is None or k % group else group


def _dots(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """Scalar products of rows [N, K], without a matrix of products."""
    products: torch.Tensor = torch.linalg.vecdot(ours, theirs)
    return products


def _without_row_factors(
    ours: torch.Tensor, theirs: torch.Tensor, expected: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Divide rows by their least-squares factor to what is expected; leave out those unlike it."""
    products, squares = _dots(ours, expected), _dots(expected, expected)
    is_like = products > _OTHER_CONTENT * (squares * _dots(ours, ours)).sqrt()
    slopes = products[is_like] / squares[is_like]
    return ours[is_like] / slopes[:, None], theirs[is_like]


def _is_other(rows: _Rows) -> bool:
    return float(rows.cosine.median()) < _OTHER_CONTENT


def _nearest_rows(ours: torch.Tensor, theirs: torch.Tensor) -> list[int | None]:
    """For each row of ours, the row of theirs it is like; None: there is none."""
    if not len(ours):
        return []
    unit = torch.nn.functional.normalize(theirs, dim=1)
    cosines = torch.nn.functional.normalize(ours, dim=1) @ unit.T
    best = cosines.max(dim=1)
    return [
        row if value > _SAME_CONTENT else None
        for value, row in zip(best.values.tolist(), best.indices.tolist(), strict=True)
    ]


def _sketch(weight: torch.Tensor) -> torch.Tensor:
    flat = weight.flatten()
    generator = torch.Generator().manual_seed(0)
    places = torch.randint(flat.numel(), (_SKETCH,), generator=generator)
    return flat[places.to(flat.device)]


def _cosine(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    return torch.cosine_similarity(ours, theirs, dim=0)


def _relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Largest difference over the largest magnitude of the original, at each row's own place."""
    size = float(theirs.norm())
    wrong = float((ours - theirs).abs().max()) if ours.numel() else 0.0
    largest = float(theirs.abs().max()) if theirs.numel() else 0.0
    return wrong / largest if largest else (math.inf if wrong and not size else 0.0)


def _ln(factors: torch.Tensor) -> torch.Tensor:
    """Natural logarithm; of factors of 0 and below one that is beyond every bound."""
    return factors.clamp(min=1e-9).log()


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2] if values else 0.0


def _named(rows: Sequence[int], word: str) -> str:
    shown = ", ".join(str(row) for row in rows[:_MAX_NAMED_ROWS])
    return f"{word} {shown} {'are' if len(rows) > 1 else 'is'}"
