"""`quantization_config` of llm-compressor's folders: the quantization of each layer.

The classes are the library's (compressed_tensors/quantization: quant_config, quant_scheme,
quant_args); the rules of targets are those of match_targets and apply_quantization_config.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, PositiveInt, ValidationError, field_validator

from flexq_bench.checkpoints.errors import CheckpointError
from flexq_bench.checkpoints.external.layer_reader import matches
from flexq_bench.kernels.formats import Kind, NumberFormat

PACKED = "pack-quantized"
NIBBLES = ("nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp6-pack-quantized")
_UNPACKED = ("int-quantized", "float-quantized", "naive-quantized", "mxfp8-quantized")
_MIXED = "mixed-precision"  # of the whole model: each group has a format of its own
_REGEX = "re:"
_MX_GROUP, _NV_GROUP = 32, 16
# Locations that need no operation at run time: rotations of weights, with their inverse.
_OFFLINE_LOCATIONS = ("weight_input", "weight_output")


class _Section(BaseModel):
    """Base class that raises ValidationError for unknown keys with a value."""

    model_config = ConfigDict(extra="allow", frozen=True)

    def unknown(self) -> list[str]:
        extra = self.model_extra or {}
        return [
            key for key in extra if key not in _IGNORED_KEYS and extra[key] not in _EMPTY_VALUES
        ]


_EMPTY_VALUES: tuple[Any, ...] = (None, False, {}, [], "")
# Keys about the origin of the numbers, types of tensors described elsewhere, and records.
_IGNORED_KEYS = (
    *("observer", "observer_kwargs", "zp_dtype"),
    *("quant_method", "quantization_status", "global_compression_ratio", "run_compressed"),
    "version",
)


class Arguments(_Section):
    """Arguments of weights or activations, as the library's QuantizationArgs."""

    num_bits: int = 8
    type: Literal["int", "float"] = "int"
    symmetric: bool = True
    strategy: str | None = None
    group_size: int | None = None
    block_structure: tuple[PositiveInt, PositiveInt] | None = None
    dynamic: bool | str = False
    actorder: bool | str | None = None
    scale_dtype: str | None = None

    @property
    def number(self) -> NumberFormat:
        """The number format of the codes. Raises ShapeError if there is none."""
        kind: Kind = "symmetric" if self.symmetric else "asymmetric"
        if self.type == "int":
            return NumberFormat(self.num_bits, self.length, kind)
        if self.is_nv:
            return NumberFormat.parse("nvfp4")
        if self.is_mx:
            return NumberFormat.parse({4: "mxfp4", 6: "mxfp6-e2m3", 8: "mxfp8"}[self.num_bits])
        rows = self.block_structure[0] if self.scope == "block" and self.block_structure else 1
        return NumberFormat(self.num_bits, self.length, "float", block_rows=rows)

    @property
    def is_nv(self) -> bool:
        """True for E4M3 scales relative to a scale of the tensor."""
        return self.type == "float" and self.scope == "tensor_group"

    @property
    def is_mx(self) -> bool:
        """True for scales that are powers of two."""
        stored_so = str(self.scale_dtype).removeprefix("torch.") == "uint8" or self.num_bits < 8
        return (
            self.type == "float"
            and self.scope == "group"
            and stored_so
            and (self.group_size == _MX_GROUP)
        )

    @property
    def scope(self) -> str:
        """Granularity of the scales, for example `tensor`, `channel` or `group`."""
        if self.strategy is not None:
            return self.strategy
        if self.group_size is None:
            return "tensor"
        return "channel" if self.group_size == -1 else "group"

    @property
    def length(self) -> int | None:
        """Values of k that share a scale; None: the whole row."""
        if self.scope == "block" and self.block_structure is not None:
            return self.block_structure[1]
        return self.group_size if self.scope in ("group", "tensor_group") else None

    @property
    def has_group_order(self) -> bool:
        """Return True if channels were grouped by their activations (`weight_g_idx`)."""
        return self.actorder is True or self.actorder in ("group", "dynamic")

    @field_validator("block_structure", mode="before")
    @classmethod
    def _as_numbers(cls, value: Any) -> Any:
        """Parse the form 128x128 of early versions."""
        return value.split("x") if isinstance(value, str) else value

    @field_validator("type", "strategy", "dynamic", "actorder", mode="before")
    @classmethod
    def _in_lower_case(cls, value: Any) -> Any:
        return value.lower() if isinstance(value, str) else value


class LayerGroup(_Section):
    """Layers with one quantization, as the library's QuantizationScheme."""

    targets: tuple[str, ...]
    weights: Arguments | None = None
    input_activations: Arguments | None = None
    output_activations: dict[str, Any] | None = None
    format: str | None = None


class CacheScheme(Arguments):
    """Rounding of cached keys and values: E4M3 with a scale a tensor, or a KV head."""

    def check(self, model: str) -> None:
        """Raise CheckpointError unless it is E4M3 with stored scales of a tensor or of heads."""
        is_read = self.type == "float" and self.num_bits == 8 and self.symmetric
        if not is_read or self.dynamic or self.scope not in ("tensor", "attn_head"):
            kind = "dynamic" if self.dynamic else "static"
            raise CheckpointError(
                f"{model} caches keys and values as {self.type} of {self.num_bits} bits, {kind}, "
                f"with a scale a {self.scope} (kv_cache_scheme): read here is E4M3, static, with a "
                "scale a tensor or attn_head"
            )
        _refuse_unknown(self, f"{model}: kv_cache_scheme")


class Configuration(_Section):
    """`quantization_config`, as the library's QuantizationConfig.

    `read_configuration` raises CheckpointError for unsupported content: unknown keys, sparsity,
    rotations of activations.
    """

    config_groups: dict[str, LayerGroup]
    format: str | None = None
    ignore: tuple[str, ...] | None = None
    kv_cache_scheme: CacheScheme | None = None
    sparsity_config: dict[str, Any] | None = None
    transform_config: dict[str, Any] | None = None

    def group_of(self, name: str, model: str) -> LayerGroup:
        """The group of a layer: exact names first, then patterns, then classes.

        Raises CheckpointError if there is none, or its weights are not supported.
        """
        if key := self.excluded_by(name):
            raise CheckpointError(
                f"{model}: {name} has codes, and its config.json says that it is not quantized "
                f"({key}): copy the folder again"
            )
        group = self._chosen(name)
        assert group is not None
        assert group.weights is not None
        self._check(name, group, group.weights, model)
        return group

    def excluded_by(self, name: str) -> str:
        """Return the key by which a layer is not quantized; empty: it is."""
        if any(_matches(name, pattern) for pattern in self.ignore or ()):
            return "ignore"
        group = self._chosen(name)
        return "no group of config_groups" if group is None or group.weights is None else ""

    def _chosen(self, name: str) -> LayerGroup | None:
        """The group of a layer. Of groups with the same target the library uses the last."""
        by_target = {target: group for group in self.config_groups.values()
                     for target in group.targets}  # fmt: skip
        targets = sorted(by_target, key=lambda target: (_REGEX in target, target))
        of_class = "Embedding" if "embed" in name.rpartition(".")[2] else "Linear"
        chosen = [by_target[target] for target in targets if _matches(name, target)]
        chosen += [by_target[target] for target in targets if target == of_class]
        return chosen[0] if chosen else None

    def _check(self, name: str, group: LayerGroup, weights: Arguments, model: str) -> None:
        form = self.format_of(group)
        known = (PACKED, *NIBBLES, *_UNPACKED)
        if form is not None and form not in known:
            raise CheckpointError(
                f"{model}: {name} is {form}, which is not read here: save it as {PACKED} or "
                f"{_UNPACKED[2]}"
            )
        if not _is_known(weights) or (weights.type == "float" and form == PACKED):
            raise CheckpointError(
                f"{model}: {name} has {weights.type} weights of {weights.num_bits} bits, scales a "
                f"{weights.scope}, in the format {form}: read here are integers of 2 to 8 bits, "
                "E4M3, MXFP4, MXFP6 (E2M3), MXFP8 and NVFP4"
            )
        if group.output_activations is not None:
            raise CheckpointError(
                f"{model}: {name} rounds its output (output_activations), which is not "
                "computed here"
            )
        inputs = group.input_activations
        if inputs is not None and not _is_known(inputs):
            raise CheckpointError(
                f"{model}: {name} has {inputs.type} activations of {inputs.num_bits} bits: read "
                "here are integers of 2 to 8 bits, E4M3, MX formats and NVFP4"
            )
        for part in (group, weights, group.input_activations):
            _refuse_unknown(part, f"{model}: {name}")

    def format_of(self, group: LayerGroup) -> str | None:
        """The format of a group's tensors; None: not specified."""
        if group.format is not None:
            return group.format
        return None if self.format == _MIXED else self.format


def read_configuration(section: dict[str, Any], model: str) -> Configuration:
    """The settings of a folder. Raises CheckpointError as Configuration."""
    groups = section.get("config_groups")
    for name, group in groups.items() if isinstance(groups, dict) else ():
        if isinstance(group, list):
            raise CheckpointError(
                f"{model} names the preset {name!r:.40} in place of settings (config_groups): save "
                "it with a version of llm-compressor that writes them out"
            )
    try:
        config = Configuration.model_validate(section)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise CheckpointError(
            f"{model}: quantization_config.{place}: {first['msg']}: its version of "
            "compressed-tensors is none that is read here (0.3 to 0.20)"
        ) from error
    _refuse_unsupported(config, model)
    return config


def _refuse_unsupported(config: Configuration, model: str) -> None:
    if config.kv_cache_scheme is not None:
        config.kv_cache_scheme.check(model)
    sparsity = (config.sparsity_config or {}).get("format", "dense")
    if sparsity != "dense":
        raise CheckpointError(f"{model} has sparse weights ({sparsity}): dense ones are read here")
    transforms = (config.transform_config or {}).get("config_groups")
    if transforms and not _are_offline(transforms):
        raise CheckpointError(
            f"{model} rotates activations when it runs (transform_config), which is not "
            "computed here: quantize the model without transforms"
        )
    _refuse_unknown(config, model)


def _is_known(arguments: Arguments) -> bool:
    if arguments.type == "int":
        return 2 <= arguments.num_bits <= 8
    if arguments.is_nv:
        return arguments.num_bits == 4 and arguments.group_size == _NV_GROUP
    return arguments.num_bits == 8 or (arguments.is_mx and arguments.num_bits in (4, 6))


def _are_offline(transforms: Any) -> bool:
    """Return True if all rotations are in the weights, and none is needed at run time."""
    try:
        places = [use["location"] for scheme in transforms.values() for use in scheme["apply"]]
    except (TypeError, KeyError, AttributeError):
        return False
    return all(place in _OFFLINE_LOCATIONS for place in places)


def _refuse_unknown(section: _Section | None, where: str) -> None:
    unknown = [] if section is None else section.unknown()
    if unknown:
        raise CheckpointError(
            f"{where}: quantization_config has {unknown[0]!r:.60}, which no version of "
            "compressed-tensors that is read here (0.3 to 0.20) writes: remove it if it says "
            "nothing of the numbers"
        )


def _matches(name: str, target: str) -> bool:
    """Return True if a target matches a name, by the library's rules.

    A pattern matches from the start of a name; any other target must equal the whole name.
    """
    if target.startswith(_REGEX):
        return matches(name, target.removeprefix(_REGEX))
    return target == name
