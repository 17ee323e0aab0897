"""A quantized layer as tensors of a checkpoint, and back, bit for bit.

    weight             codes of 8 bits with quantized activations (INT8), of FP8, or a dense weight
    weight_packed      int32 [N, words]: other codes, from 0 up, in the layout of `packing`
    weight_tail        int8 [N, K - start]: codes of the last group, if it has 8 bits (Atom)
    weight_scale       [row blocks, groups], of the format's scale type; INT8 of dual-grained ones
    weight_row_scale   FP16 [N, 1], of dual-grained weights
    weight_matrix_scale  FP32 [1], which multiplies E4M3 scales
    weight_zero_point  the code that means 0: int32 [words, groups], packed along N; for codes
                       of 8 bits in `weight`: int8 [N, groups]
    weight_shape       int64 [2], N and K, with weight_packed
    weight_order       int32 [K]: the input channel at each position
    input_scale        FP16 [1], of a static activation
    input_zero_point   int8 [1]
    bias               FP16 [N]
    input_rotation     FP32, of the input's rotation (schemes.rotation): [m, m], the block of a
                       Hadamard matrix; [2, K / b, b, b], blocks before and after a permutation
    input_rotation_order  int32 [K], that permutation: the channel at each position

Names, types and layout are those of compressed-tensors 0.20 if it has them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch

from flexq_bench.checkpoints.config import FLOAT, INT, ActivationEntry, LayerEntry
from flexq_bench.checkpoints.errors import CheckpointError
from flexq_bench.checkpoints.packing import pack_codes, unpack_codes, words_of
from flexq_bench.kernels.errors import ShapeError
from flexq_bench.kernels.formats import FP16, NumberFormat, Operand, format_of
from flexq_bench.kernels.formats.dual_grained import SIX_BITS, TOP_SIX_BIT_SCALE
from flexq_bench.kernels.formats.scales import SCALE_TYPES, per_row
from flexq_bench.schemes.quantized_layer import QuantizedLayer
from flexq_bench.schemes.rotation import BlockRotation, HadamardRotation, Rotation

Tensors = dict[str, torch.Tensor]
Spec = tuple[torch.dtype, tuple[int, ...]]
_BYTE_BITS = 8
_MAX_ORTHOGONALITY_ERROR = 1e-4  # tolerance of an element of B Bᵀ
_INT8_OFFSET = 128  # subtracted from codes of 8 bits from 0 up to give INT8


def encode(layer: QuantizedLayer) -> tuple[LayerEntry, Tensors]:
    """Return a layer's entry in config.json, and its tensors by the names above.

    Raises CheckpointError if scales are not finite or codes do not fit the layer's format.
    """
    operand = layer.weight
    number = _stored_format(operand)
    activation = None if layer.activation is None else ActivationEntry.of(layer.activation)
    entry = LayerEntry(
        weight=number.name,
        shape=(operand.rows, operand.k),
        activation=activation,
        bias=layer.bias is not None,
        tail_bits=operand.tail_bits,
        ordered=operand.order is not None,
        rotation=_rotation_order(layer.rotation),
        permuted=isinstance(layer.rotation, BlockRotation),
    )
    tensors: Tensors = {}
    if number.is_dense or (number.kind == "float" and entry.storage == FLOAT):
        tensors["weight"] = operand.values
    else:
        tensors |= _encode_codes(operand, number, entry)
    scales = _stored_scales(operand, number)
    if scales is not None:
        tensors["weight_scale"] = scales
    if operand.row_scales is not None:
        is_shared = number.scale == "e4m3"
        name = "weight_matrix_scale" if is_shared else "weight_row_scale"
        tensors[name] = operand.row_scales[0] if is_shared else operand.row_scales
    if operand.order is not None:
        tensors["weight_order"] = operand.order.to(torch.int32)
    if layer.bias is not None:
        tensors["bias"] = layer.bias.to(torch.float16)
    if isinstance(layer.rotation, HadamardRotation):
        if layer.rotation.signs is not None:
            raise CheckpointError("a rotation of a layer's input has no signs: fold them")
        tensors["input_rotation"] = layer.rotation.block
    if isinstance(layer.rotation, BlockRotation):
        tensors["input_rotation"] = layer.rotation.blocks
        tensors["input_rotation_order"] = layer.rotation.order.to(torch.int32)
    tensors |= _encode_static(entry)
    _check(entry, tensors)
    return entry, tensors


def decode(entry: LayerEntry, tensors: Mapping[str, torch.Tensor]) -> QuantizedLayer:
    """The layer of these tensors, on their device. Raises CheckpointError as `encode`."""
    _check(entry, tensors)
    number = entry.format
    zeros = None
    if number.is_dense:
        values, group = tensors["weight"], None
    else:
        values, group = _decode_values(entry, number, tensors), number.group
        zeros = _decode_zeros(entry, number, tensors)
    rows, scales = entry.shape[0], tensors.get("weight_scale")
    if scales is not None:
        scales = per_row(scales.to(SCALE_TYPES[number.scale]), number.block_rows, rows)
    row_scales = tensors.get("weight_row_scale")
    if "weight_matrix_scale" in tensors:
        row_scales = tensors["weight_matrix_scale"].expand(rows, 1).contiguous()
    operand = Operand(
        values,
        scales,
        number.bits,
        group,
        zeros,
        row_scales,
        entry.tail_bits,
        tensors.get("weight_order"),
        element=number.element,
        block_rows=number.block_rows,
    )
    activation = None if entry.activation is None else entry.activation.quantizer()
    return QuantizedLayer(operand, activation, tensors.get("bias"), _decode_rotation(tensors))


def _rotation_order(rotation: Rotation | None) -> int | None:
    if isinstance(rotation, BlockRotation):
        return rotation.blocks.shape[-1]
    return rotation.block.shape[-1] if isinstance(rotation, HadamardRotation) else None


def _decode_rotation(tensors: Mapping[str, torch.Tensor]) -> Rotation | None:
    blocks, order = tensors.get("input_rotation"), tensors.get("input_rotation_order")
    if blocks is None:
        return None
    return HadamardRotation(blocks) if order is None else BlockRotation(blocks, order.long())


def specs(entry: LayerEntry) -> dict[str, Spec]:
    """Type and shape of each tensor of a layer."""
    (n, k), number, groups = entry.shape, entry.format, entry.groups
    tensors: dict[str, Spec] = {}
    if number.is_dense:
        tensors["weight"] = (torch.float16 if number == FP16 else torch.float32, (n, k))
    else:
        dual = number.kind == "dual"
        blocks = -(-n // (number.block_rows or n))
        scale_type = torch.int8 if dual else SCALE_TYPES[number.scale]
        tensors["weight_scale"] = (scale_type, (blocks, groups))
        if dual:
            tensors["weight_row_scale"] = (torch.float16, (n, 1))
        if number.scale == "e4m3":
            tensors["weight_matrix_scale"] = (torch.float32, (1,))
        head = tail_start_of(entry)
        if entry.storage == FLOAT:
            tensors["weight"] = (number.float_type.dtype, (n, k))
        elif entry.storage == INT:
            tensors["weight"] = (torch.int8, (n, head))
        else:
            tensors["weight_packed"] = (torch.int32, (n, words_of(head, number.bits)))
            tensors["weight_shape"] = (torch.int64, (2,))
        if head != k:
            tensors["weight_tail"] = (torch.int8, (n, k - head))
        if number.has_zero_points:
            packed = (torch.int32, (words_of(n, number.bits), groups))
            tensors["weight_zero_point"] = (
                (torch.int8, (n, groups)) if entry.storage == INT else packed
            )
    if entry.ordered:
        tensors["weight_order"] = (torch.int32, (k,))
    if entry.rotation is not None:
        shape: tuple[int, ...] = (entry.rotation, entry.rotation)
        if entry.permuted:
            tensors["input_rotation_order"] = (torch.int32, (k,))
            shape = (2, k // entry.rotation, *shape)
        tensors["input_rotation"] = (torch.float32, shape)
    if entry.bias:
        tensors["bias"] = (torch.float16, (n,))
    static = _static(entry)
    if static is not None:
        tensors["input_scale"] = (torch.float16, (1,))
        if static.zero is not None:
            tensors["input_zero_point"] = (torch.int8, (1,))
    return tensors


def all_finite(tensor: torch.Tensor) -> bool:
    """Return True if no value is NaN or infinite, by one pass without a copy.

    Either would be one of the extremes.
    """
    return tensor.numel() == 0 or all(map(math.isfinite, map(float, torch.aminmax(tensor))))


def is_finite_or_bound(tensor: torch.Tensor) -> bool:
    """Return True as all_finite, and for a single infinity: a bound that limits nothing."""
    return all_finite(tensor) or (tensor.numel() == 1 and not bool(tensor.isnan().any()))


def tail_start_of(entry: LayerEntry) -> int:
    """Number of values of k that have the format's own bits: all except a tail."""
    group = entry.format.group
    if entry.tail_bits is None or group is None:
        return entry.shape[1]
    return (entry.groups - 1) * group


def _stored_format(operand: Operand) -> NumberFormat:
    try:
        return format_of(operand)
    except ShapeError as error:
        raise CheckpointError(f"no checkpoint stores such a weight: {error}") from error


def _stored_scales(operand: Operand, number: NumberFormat) -> torch.Tensor | None:
    """Return the scales as they are stored: once for each block. None: dense."""
    scales, stored = operand.scales, operand.block_scales
    if scales is None or stored is None:
        return None
    if number.kind == "dual":
        stored = scales.to(torch.int8)
        if not torch.equal(stored.to(scales), scales):
            raise CheckpointError("scales of dual-grained groups are integers up to 127")
    elif not torch.equal(per_row(stored, number.block_rows, operand.rows).float(), scales.float()):
        raise CheckpointError(f"rows of a block of {number.name} have different scales")
    return stored


def _base(entry: LayerEntry) -> int:
    """The code that is stored as 0."""
    number = entry.format
    signed = number.kind in ("symmetric", "mixed", "dual") and not number.has_zero_points
    return -(1 << (number.bits - 1)) if signed else 0


def _encode_codes(operand: Operand, number: NumberFormat, entry: LayerEntry) -> Tensors:
    start = tail_start_of(entry)
    head = operand.values[:, :start]
    if number.kind == "float":
        stored = _float_codes(head, number)
    else:
        stored = _in_range(head.to(torch.int16) - _base(entry), number, "codes")
    tensors: Tensors = {}
    if start != operand.k:
        tensors["weight_tail"] = operand.values[:, start:].contiguous()
    if entry.storage == INT:
        tensors["weight"] = (stored - _INT8_OFFSET).to(torch.int8)
    else:
        tensors["weight_packed"] = pack_codes(stored, number.bits)
        tensors["weight_shape"] = torch.tensor(entry.shape)
    if operand.zero_points is not None:
        zeros = _in_range(-operand.zero_points.to(torch.int16), number, "zero points")
        tensors["weight_zero_point"] = (
            (zeros - _INT8_OFFSET).to(torch.int8)
            if entry.storage == INT
            else pack_codes(zeros.T, number.bits).T.contiguous()
        )
    return tensors


def _decode_values(
    entry: LayerEntry, number: NumberFormat, tensors: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    if entry.storage == FLOAT:
        return tensors["weight"]
    if entry.storage == INT:
        stored = tensors["weight"].to(torch.int16) + _INT8_OFFSET
    else:
        start = tail_start_of(entry)
        stored = unpack_codes(tensors["weight_packed"], number.bits, start)
    if number.kind == "float":
        numbers = number.float_type.numbers().to(torch.float16).to(stored.device)
        return numbers[stored.int()]
    unsigned = number.kind == "asymmetric" and number.bits == _BYTE_BITS  # as in Operand
    values = (stored.to(torch.int16) + _base(entry)).to(torch.uint8 if unsigned else torch.int8)
    if "weight_tail" in tensors:
        values = torch.cat([values, tensors["weight_tail"]], dim=1)
    return values


def _decode_zeros(
    entry: LayerEntry, number: NumberFormat, tensors: Mapping[str, torch.Tensor]
) -> torch.Tensor | None:
    zeros = tensors.get("weight_zero_point")
    if zeros is None:
        return None
    if entry.storage == INT:
        stored = zeros.to(torch.int16) + _INT8_OFFSET
    else:
        stored = unpack_codes(zeros.T, number.bits, entry.shape[0]).T.to(torch.int16)
    return (-stored).to(torch.int16 if number.bits == _BYTE_BITS else torch.int8).contiguous()


def _float_codes(values: torch.Tensor, number: NumberFormat) -> torch.Tensor:
    codes = number.float_type.codes(values)
    numbers = number.float_type.numbers().to(torch.float16).to(values.device)
    if not torch.equal(numbers[codes.clamp(max=(1 << number.bits) - 1)], values):
        raise CheckpointError(f"a weight of {number.bits} bits has numbers that the format lacks")
    return codes


def _in_range(stored: torch.Tensor, number: NumberFormat, what: str) -> torch.Tensor:
    if stored.numel():
        low, high = (int(bound) for bound in torch.aminmax(stored))
        if low < 0 or high >= 1 << number.bits:
            raise CheckpointError(f"{what} of a weight exceed the {number.bits} bits that "
                f"{number.name} has")  # fmt: skip
    return stored


def _static(entry: LayerEntry) -> ActivationEntry | None:
    """The layer's static activation, if any."""
    activation = entry.activation
    return activation if activation is not None and activation.kind == "static" else None


def _encode_static(entry: LayerEntry) -> Tensors:
    static = _static(entry)
    if static is None or static.scale is None:
        return {}
    tensors = {"input_scale": torch.tensor([static.scale], dtype=torch.float16)}
    if static.zero is not None:
        half = 1 << (static.number.bits - 1)  # compressed-tensors' codes are signed
        tensors["input_zero_point"] = torch.tensor([static.zero - half], dtype=torch.int8)
    return tensors


def _check(entry: LayerEntry, tensors: Mapping[str, torch.Tensor]) -> None:
    expected = specs(entry)
    if set(expected) != set(tensors):
        odd = min(set(expected) ^ set(tensors))
        raise CheckpointError(f"{'lacks' if odd in expected else 'has an unknown'} {odd}")
    for name, (dtype, shape) in expected.items():
        tensor = tensors[name]
        if tensor.dtype != dtype or tuple(tensor.shape) != shape:
            raise CheckpointError(
                f"{name} is {_described(tensor.dtype, tuple(tensor.shape))}, must be "
                f"{_described(dtype, shape)}"
            )
        is_checked = dtype in (torch.float16, torch.float32) or name == "weight_scale"
        if is_checked and not all_finite(tensor.float()):
            raise CheckpointError(f"{name} holds NaN or infinity")
    for name, faulty, why in _FAULTS:
        if name in tensors and faulty(entry, tensors[name]):
            raise CheckpointError(f"{name} {why}")
    for name, stored in _encode_static(entry).items():
        if not torch.equal(stored, tensors[name].cpu()):
            raise CheckpointError(f"{name} differs from what the configuration says")


def _described(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"


def _has_nan(entry: LayerEntry, weight: torch.Tensor) -> bool:
    """Return True for a code of infinity or NaN, of which FP8 types have the highest ones."""
    if entry.storage != FLOAT:
        return False
    special_codes = entry.format.float_type.special_codes
    return bool(((weight.view(torch.uint8) & 0x7F) > 0x7F - special_codes).any())


def _no_permutation(entry: LayerEntry, order: torch.Tensor) -> bool:
    k = entry.shape[1]
    return not torch.equal(order.sort().values.cpu(), torch.arange(k, dtype=torch.int32))


def _no_rotation(entry: LayerEntry, block: torch.Tensor) -> bool:
    count, rest = divmod(entry.shape[1], block.shape[-1])
    product = block.double() @ block.double().mT
    wrong = float((product - torch.eye(block.shape[-1]).to(product)).abs().max())
    uneven = bool(rest) or (not entry.permuted and count & (count - 1) != 0)
    return uneven or not wrong <= _MAX_ORTHOGONALITY_ERROR


def _no_group_integer(entry: LayerEntry, scale: torch.Tensor) -> bool:
    if scale.dtype != torch.int8:
        return False
    low, high = (int(bound) for bound in torch.aminmax(scale))
    six_bits = entry.format.bits == SIX_BITS
    return low < six_bits or (six_bits and high > TOP_SIX_BIT_SCALE)


_FAULTS: tuple[tuple[str, Callable[[LayerEntry, torch.Tensor], bool], str], ...] = (
    ("weight", _has_nan, "holds NaN"),
    ("input_scale", lambda entry, scale: float(scale) <= 0, "is zero in FP16"),
    ("input_rotation", _no_rotation, "is not orthogonal, or its blocks don't make K"),
    ("input_rotation_order", _no_permutation, "is no permutation of the input's channels"),
    ("weight_order", _no_permutation, "is no permutation of the input's channels"),
    (
        "weight_shape",
        lambda entry, shape: tuple(shape.tolist()) != entry.shape,
        "differs from what the configuration says",
    ),
    (
        "weight_scale",
        _no_group_integer,
        "of dual-grained groups is negative, or of 6 bits no integer of 1 to 4",
    ),
)
