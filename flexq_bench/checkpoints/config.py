"""`config.json` of a quantized checkpoint: the convention of compressed-tensors, and its extension.

`quantization_config` is in the form that `compressed-tensors` reads (QuantizationConfig of version
0.20): config_groups with targets, weights and input_activations. Its section `flexq_bench` has
everything that this form cannot express: the scheme and its seed, the bits of keys and values, the
format of each layer as a NumberFormat, the content hash. If a layer can't be expressed in
config_groups, they are one group of format `flexq-bench`, without arguments of weights. Other
loaders refuse that, whereas they ignore an unknown quant_method and fill in random weights.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Annotated, Any, Literal, Self

import torch
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from flexq_bench.checkpoints.errors import CheckpointError
from flexq_bench.kernels.errors import ShapeError
from flexq_bench.kernels.formats import NumberFormat
from flexq_bench.schemes.activations import (
    ActivationQuantizer,
    DynamicActivation,
    StaticActivation,
)
from flexq_bench.schemes.calibration import Calibration

FORMAT_VERSION: Literal[1] = 1
SECTION = "flexq_bench"
QUANTIZATION = "quantization_config"
COMPRESSED_TENSORS: Literal["compressed-tensors"] = "compressed-tensors"
PACKED, INT, FLOAT, MIXED = (
    *("pack-quantized", "int-quantized", "float-quantized", "mixed-precision"),
)
OWN = "flexq-bench"  # not a format of compressed-tensors
DENSE_KV_BITS = 16
_FP8_BITS = 8
# Of Hugging Face's configuration: the model's origin, and the dtype for loading.
_UNDECIDING = ("_name_or_path", "transformers_version", "torch_dtype", "dtype")


def parsed(name: str) -> NumberFormat:
    """The number format of this name. Raises ValueError, as pydantic requires, if unknown."""
    try:
        return NumberFormat.parse(name)
    except ShapeError as error:
        raise ValueError(str(error)) from error


def _format_name(name: str) -> str:
    parsed(name)
    return name


FormatName = Annotated[str, AfterValidator(_format_name)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class StoredScheme(_Strict):
    """The scheme that produced a checkpoint: its registered name, version and options, and the
    seed.

    options: by the names of the scheme's SchemeOptions; empty for a checkpoint of another tool.
    """

    name: str
    version: int
    options: dict[str, Any] = {}
    seed: int = 0


class StoredCalibration(_Strict):
    """The token ids of a scheme's calibration, with device and dtype.

    tokens: SHA-256 of the ids, see Calibration.digest. length: tokens of a segment. device: `cpu`,
    or the GPU's name. dtype: of the weights during calibration, a name of torch's. segment_hashes:
    as in Calibration; empty in checkpoints of earlier versions.
    """

    tokens: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    segments: Annotated[int, Field(ge=1, strict=True)]
    length: Annotated[int, Field(ge=2, strict=True)]
    device: Annotated[str, Field(min_length=1)]
    dtype: Literal["float32", "float16", "bfloat16"]
    segment_hashes: tuple[Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")], ...] = ()

    @classmethod
    def of(
        cls, calibration: Calibration, device: torch.device, dtype: torch.dtype
    ) -> StoredCalibration:
        """The entry of a calibration on a device, of weights of a dtype."""
        return cls(
            tokens=calibration.digest,
            segments=calibration.segments,
            length=calibration.length,
            device=device_kind(device),
            dtype=str(dtype).removeprefix("torch."),  # type: ignore[arg-type]
            segment_hashes=calibration.segment_hashes,
        )


class ActivationEntry(_Strict):
    """A layer's activation: dynamic (scales per token), or static (one scale, and a zero point).

    clip: share of the range that codes span.
    """

    kind: Literal["dynamic", "static"]
    format: FormatName
    clip: Annotated[float, Field(gt=0, le=1)] = 1.0
    scale: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    zero: int | None = None

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        static = self.kind == "static"
        if static != (self.scale is not None):
            raise ValueError("a static activation has a scale, a dynamic one none")
        if (self.zero is not None) != (static and self.number.kind == "asymmetric"):
            raise ValueError("a static activation of an asymmetric format has a zero point")
        return self

    @classmethod
    def of(cls, activation: ActivationQuantizer) -> ActivationEntry:
        """The entry of an activation quantizer."""
        number = activation.format
        if isinstance(activation, DynamicActivation) and activation.bound is None:
            return cls(kind="dynamic", format=number.name, clip=number.clip)
        if not isinstance(activation, StaticActivation):
            raise CheckpointError("no checkpoint stores columns that are not rounded, or a bound")
        return cls(
            kind="static",
            format=number.name,
            clip=number.clip,
            scale=activation.scale,
            zero=activation.zero,
        )

    @property
    def number(self) -> NumberFormat:
        return replace(parsed(self.format), clip=self.clip)

    def quantizer(self) -> ActivationQuantizer:
        if self.scale is None:
            return DynamicActivation(self.number)
        return StaticActivation(self.number, self.scale, self.zero)


class LayerEntry(_Strict):
    """A quantized layer: format of its weight [n, k], and of its activation (null: FP16).

    tail_bits: of the last group's codes, if they differ. ordered: True if it has an order of
    channels. rotation: order of a block of its input's rotation (schemes.rotation); null: none.
    permuted: the rotation has many blocks, before and after a permutation; otherwise one.
    """

    weight: FormatName
    shape: tuple[Annotated[int, Field(gt=0)], Annotated[int, Field(gt=0)]]
    activation: ActivationEntry | None = None
    bias: bool = False
    tail_bits: int | None = None
    ordered: bool = False
    rotation: Annotated[int, Field(gt=0)] | None = None
    permuted: bool = False

    @property
    def format(self) -> NumberFormat:
        return parsed(self.weight)

    @property
    def groups(self) -> int:
        """Number of scales of a row."""
        group = self.format.group
        return 1 if group is None else math.ceil(self.shape[1] / group)

    @property
    def storage(self) -> str:
        """Storage format of the codes, as compressed-tensors names it; dense weights: `dense`."""
        number = self.format
        if number.is_dense:
            return "dense"
        if number.kind == "float" and number.bits == _FP8_BITS:
            return FLOAT
        if number.bits == 8 and number.is_integer and self.activation is not None:
            return INT
        return PACKED

    def group_entry(self) -> ConfigGroup | None:
        """Return the layer's compressed-tensors group, without targets; None: it has no such group.

        Its reader accepts only groups that divide K.
        """
        weights = _arguments(self.format, self.shape[1], dynamic=False)
        inputs = None
        if self.activation is not None:
            inputs = _activation_arguments(self.activation, self.shape[1])
            if inputs is None:
                return None
        if weights is None or self.ordered or self.tail_bits is not None:
            return None
        if self.rotation is not None:
            return None
        return ConfigGroup(
            targets=(), weights=weights, input_activations=inputs, format=self.storage
        )


class QuantizationArgs(_Strict):
    """Arguments of one operand, as compressed-tensors names them."""

    num_bits: int
    type: Literal["int", "float"]
    symmetric: bool
    strategy: Literal["tensor", "channel", "group", "token"]
    group_size: int | None = None
    dynamic: bool = False


class ConfigGroup(_Strict):
    """Layers (targets: their names) of one format, as compressed-tensors describes them."""

    targets: tuple[str, ...]
    weights: QuantizationArgs | None = None
    input_activations: QuantizationArgs | None = None
    output_activations: None = None
    format: str


class Extension(_Strict):
    """Fields of a checkpoint that compressed-tensors does not define.

    synthetic: the weights are random, of a model's true shapes. files: SHA-256 of the tokenizer's
    files, by name. content_hash: see `hashing`. separated: some layers are not modules of
    transformers (schemes.linear_layers), so that other readers find no weights for them; null: all
    layers are. calibration: null for uncalibrated schemes, and in checkpoints of earlier versions;
    it is not part of the content hash.
    """

    # a reader refuses other versions before it validates the rest
    version: Literal[1] = FORMAT_VERSION
    scheme: StoredScheme
    kv_bits: Literal[16, 8, 4]
    layers: dict[str, LayerEntry]
    synthetic: bool = False
    files: dict[str, str] = {}
    content_hash: str = ""
    separated: Literal[True] | None = None
    calibration: StoredCalibration | None = None


class QuantizationSection(_Strict):
    """`quantization_config` of one of our checkpoints."""

    quant_method: Literal["compressed-tensors"] = COMPRESSED_TENSORS
    format: str
    quantization_status: Literal["compressed"] = "compressed"
    config_groups: dict[str, ConfigGroup]
    ignore: tuple[str, ...]
    kv_cache_scheme: None = None
    flexq_bench: Extension


def device_kind(device: torch.device) -> str:
    """`cpu`, or the name of a GPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def section_of(extension: Extension, ignored: tuple[str, ...]) -> QuantizationSection:
    """The `quantization_config` of these layers. ignored: unquantized linear layers."""
    groups: dict[ConfigGroup, list[str]] = {}
    dense: list[str] = []
    # other programs would not quantize keys and values
    is_expressible = extension.kv_bits == DENSE_KV_BITS
    is_expressible = is_expressible and not extension.separated
    for name, layer in extension.layers.items():
        if layer.storage == "dense" and layer.activation is None:
            dense.append(name)
            continue
        group = layer.group_entry()
        if group is None:
            is_expressible = False
            break
        groups.setdefault(group, []).append(name)
    if not is_expressible or not groups:
        groups = {ConfigGroup(targets=(), format=OWN): ["Linear"]}
    formats = {group.format for group in groups}
    return QuantizationSection(
        format=formats.pop() if len(formats) == 1 else MIXED,
        config_groups={
            f"group_{index}": group.model_copy(update={"targets": tuple(names)})
            for index, (group, names) in enumerate(groups.items())
        },
        ignore=(*dense, *ignored),
        flexq_bench=extension,
    )


def dumped_section(extension: Extension, ignored: tuple[str, ...]) -> dict[str, Any]:
    """`section_of` in the form of config.json, without a content hash."""
    section = section_of(extension, ignored).model_dump(mode="json", exclude_none=True)
    section[SECTION]["layers"] = {
        name: entry.model_dump(mode="json", exclude_defaults=True)
        for name, entry in extension.layers.items()
    }
    return section


def read_section(raw: Any, where: str) -> QuantizationSection:
    """Validate a `quantization_config` of ours.

    Raises CheckpointError with one line for another version, unknown fields, unknown formats, or
    config_groups that contradict the layers.
    """
    version = raw.get(SECTION, {}).get("version") if isinstance(raw.get(SECTION), dict) else None
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"{where} has version {version} of the {SECTION} section, this program reads "
            f"{FORMAT_VERSION}: use the program that wrote it, or quantize again"
        )
    try:
        section = QuantizationSection.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        reason = first["msg"].removeprefix("Value error, ")
        raise CheckpointError(
            f"{where}: {QUANTIZATION}.{place}: {reason}: quantize again"
        ) from error
    extension = section.flexq_bench
    ignored = tuple(name for name in section.ignore if name not in extension.layers)
    if section_of(extension, ignored) != section:
        raise CheckpointError(
            f"{where}: its config_groups contradict its {SECTION} section: quantize again"
        )
    return section


def deciding(config: dict[str, Any]) -> dict[str, Any]:
    """The parts of config.json that affect results; the content hash covers them."""
    deciding = {key: value for key, value in config.items() if key not in _UNDECIDING}
    if SECTION not in deciding[QUANTIZATION]:
        return deciding  # those of other tools have no hash of the content
    # Equal bytes have equal hashes, for any calibration.
    section = deciding[QUANTIZATION][SECTION]
    extension = {key: value for key, value in section.items() if key != "calibration"}
    extension["content_hash"] = ""
    return {**deciding, QUANTIZATION: {**deciding[QUANTIZATION], SECTION: extension}}


def _arguments(number: NumberFormat, k: int, *, dynamic: bool) -> QuantizationArgs | None:
    if number.clip != 1 or (number.group is not None and k % number.group):
        return None
    a_row: Literal["token", "channel"] = "token" if dynamic else "channel"
    if number.kind == "float" and number.element != "e4m3":
        return None
    if number.scale != "fp16" or number.block_rows != 1:
        return None
    if number.kind not in ("symmetric", "asymmetric", "float"):
        return None
    return QuantizationArgs(
        num_bits=number.bits,
        type="float" if number.kind == "float" else "int",
        symmetric=number.kind != "asymmetric",
        strategy=a_row if number.group is None else "group",
        group_size=number.group,
        dynamic=dynamic,
    )


def _activation_arguments(entry: ActivationEntry, k: int) -> QuantizationArgs | None:
    arguments = _arguments(entry.number, k, dynamic=entry.kind == "dynamic")
    if entry.kind == "dynamic" or arguments is None:
        return arguments
    return arguments.model_copy(update={"strategy": "tensor", "group_size": None})
