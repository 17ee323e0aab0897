"""Registry of schemes by name.

To add a scheme: write a module with its Scheme, and add a line to _FAMILIES; or, outside of this
project, write a function (`own_schemes`).

A name defines how a model is quantized: algorithm, number formats of each layer, which determine
its kernel (`kernel_choice`), and the KV cache. It has the same meaning for every verb. It is a
family with its bits, `rtn-w4a8`, and may have options in brackets: `w6a6[group=none]`,
`atom-w4a4[outliers=0,gptq=false]`; these are fields of the scheme's options. A final `+kv8` is
short for `kv_bits=8`, a KV cache of 8 bits.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from flexq_bench.kernels.decoder import KV_BITS
from flexq_bench.schemes.abq import Abq, AbqOptions
from flexq_bench.schemes.atom import Atom, AtomOptions
from flexq_bench.schemes.auto_round import AutoRound, AutoRoundOptions
from flexq_bench.schemes.awq import Awq, AwqOptions
from flexq_bench.schemes.dgq import Dgq, DgqOptions
from flexq_bench.schemes.duquant import DuQuant, DuQuantOptions
from flexq_bench.schemes.errors import QuantizeError
from flexq_bench.schemes.flexq import Flexq, FlexqOptions
from flexq_bench.schemes.floats import FloatOptions, Floats, SmallFloatOptions
from flexq_bench.schemes.gptq import Gptq, GptqSchemeOptions
from flexq_bench.schemes.kernel_choice import kernel_label, no_kernel_reason
from flexq_bench.schemes.layer_formats import LayerFormats
from flexq_bench.schemes.learned_scheme import LearnedOptions, OmniQuant
from flexq_bench.schemes.own_schemes import OwnScheme, own_schemes, scheme_of, use_schemes_from
from flexq_bench.schemes.quarot import QuaRot, QuaRotOptions
from flexq_bench.schemes.scheme import Scheme, SchemeOptions
from flexq_bench.schemes.smoothquant import SmoothQuant, SmoothQuantOptions
from flexq_bench.schemes.spinquant import SpinQuant, SpinQuantOptions
from flexq_bench.schemes.two_level import TwoLevel, TwoLevelOptions
from flexq_bench.schemes.uniform import FULL_BITS, Dense, Uniform, UniformOptions
from flexq_bench.workloads.names import unknown

Bits = Mapping[str, str]  # named parts of the pattern that matched
_NAME = re.compile(
    r"(?P<family>[^\[\]+]+)(?:\[(?P<options>[^\[\]]*)\])?(?:\+kv(?P<kv_bits>[^\[\]+]*))?"
)
# Former names, and their present ones.
_RENAMED = {"fp6-w6a16": "fp6", "fp5-w5a16": "fp5", "flexq-w6a8": "w6a8"}
# Layers of a block, by whether its feed-forward is gated.
_KINDS = {
    True: ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    False: ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"),
}


@dataclass(frozen=True, slots=True)
class _Family:
    """Names that one pattern matches. options: the defaults for a matched name."""

    pattern: str
    scheme: type[Scheme]
    options: Callable[[Bits], SchemeOptions]
    examples: tuple[str, ...]
    summary: str


@dataclass(frozen=True, slots=True)
class LayerKernel:
    """Layers of a kind, with their formats and kernel.

    kinds: in the order of the forward pass. kernel: a label; "": there is none, see `reason`.
    """

    kinds: tuple[str, ...]
    formats: LayerFormats
    kernel: str
    reason: str


@dataclass(frozen=True, slots=True)
class NamedScheme:
    """A scheme as shown by `list schemes`.

    gated, plain: layers of a model with a gated feed-forward (LLaMA), and without (OPT).
    """

    scheme: Scheme
    summary: str
    gated: tuple[LayerKernel, ...]
    plain: tuple[LayerKernel, ...]


def _uniform(bits: Bits) -> UniformOptions:
    w_bits, a_bits = int(bits["w"]), int(bits["a"])
    if (w_bits, a_bits) == (8, FULL_BITS):  # the format of the kernel
        return UniformOptions(w_bits, a_bits, group=None)
    return UniformOptions(w_bits, a_bits)


# Formats of weights and activations. MXFP6 has E2M3, the more accurate type of normal values.
_FLOATS = {
    "fp8": ("fp8/row", "fp8/row"),
    "fp8-block": ("fp8/128x128", "fp8/128"),
    "mxfp4": ("mxfp4", "mxfp4"),
    "mxfp6": ("mxfp6-e2m3", "mxfp6-e2m3"),
    "mxfp8": ("mxfp8", "mxfp8"),
    "nvfp4": ("nvfp4", "nvfp4"),
}


def _floats(parts: Bits) -> FloatOptions:
    weight, activation = _FLOATS[parts["weight"]]
    return FloatOptions(weight, {"16": "fp16", "8": "mxfp8"}.get(parts["a"], activation))


_FAMILIES: tuple[_Family, ...] = (
    _Family(
        "fp16",
        Dense,
        lambda bits: SchemeOptions(),
        ("fp16",),
        "nothing is quantized",
    ),
    _Family(
        "flexq-w6ax",
        Flexq,
        lambda bits: FlexqOptions(),
        ("flexq-w6ax", "flexq-w6ax[a8_budget=0.25]"),
        "W6A6, and A8 for down_proj of gated models or for the layers that gain most",
    ),
    _Family(
        r"w(?P<w>[2-8]|16)a(?P<a>[2-8]|16)",
        Uniform,
        _uniform,
        ("w6a6", "w6a8", "w4a4", "w6a16", "w8a16", "w8a16[group=128]", "w4a16"),
        "rounded to nearest, groups of 128; w8a16: one scale per output channel",
    ),
    _Family(
        r"rtn-w(?P<w>[2-8]|16)a(?P<a>[2-8]|16)",
        Uniform,
        lambda bits: UniformOptions(int(bits["w"]), int(bits["a"]), group=None),
        ("rtn-w8a8", "rtn-w6a6", "rtn-w4a4"),
        "rounded to nearest, one scale per output channel and per token",
    ),
    _Family(
        r"gptq-w(?P<w>[2-8])a(?P<a>[2-8]|16)",
        Gptq,
        lambda bits: GptqSchemeOptions(int(bits["w"]), int(bits["a"])),
        ("gptq-w4a16", "gptq-w3a16"),
        "errors of rounding compensated in the columns to come",
    ),
    _Family(
        r"autoround-w(?P<w>[2-8])a16",
        AutoRound,
        lambda bits: AutoRoundOptions(int(bits["w"])),
        ("autoround-w4a16",),
        "rounding and ranges of weights learned by signed gradients",
    ),
    _Family(
        r"fp(?P<w>[56])",
        Floats,
        lambda bits: SmallFloatOptions(int(bits["w"])),
        ("fp6", "fp5", "fp6[gptq=true]", "fp6[group=128]"),
        "weights as small floats, one scale per output channel",
    ),
    _Family(
        r"(?P<weight>fp8|fp8-block|mxfp4|mxfp6|mxfp8|nvfp4)(?:-a(?P<a>16|(?<=mxfp[46]-a)8))?",
        Floats,
        _floats,
        (
            "fp8",
            "fp8-a16",
            "fp8-block",
            "mxfp4",
            "mxfp4-a16",
            "mxfp6",
            "mxfp8",
            "nvfp4",
            "nvfp4-a16",
        ),
        "FP8 of channels and tokens or of blocks, OCP MX, NVFP4; -a16: FP16 activations",
    ),
    _Family(
        r"awq-w(?P<w>[2-8])a16",
        Awq,
        lambda bits: AwqOptions(int(bits["w"])),
        ("awq-w4a16",),
        "weights scaled by the activations they meet, ranges clipped",
    ),
    _Family(
        r"smoothquant-w(?P<w>[2-8])a(?P<a>[2-8])",
        SmoothQuant,
        lambda bits: SmoothQuantOptions(int(bits["w"]), int(bits["a"])),
        ("smoothquant-w8a8", "smoothquant-w6a6", "smoothquant-w6a6[alpha=none]"),
        "difficulty moved from activations to weights, then rounded to nearest",
    ),
    _Family(
        r"omniquant-w(?P<w>[2-8])a(?P<a>[2-8]|16)",
        OmniQuant,
        lambda bits: LearnedOptions(int(bits["w"]), int(bits["a"])),
        ("omniquant-w6a6", "omniquant-w4a4", "omniquant-w4a16[group=128,symmetric=false]"),
        "scales and clipping learned block by block",
    ),
    _Family(
        r"abq-w(?P<w>[2-8])(?P<balanced>\*?)a(?P<a>[2-8]|16)",
        Abq,
        lambda bits: AbqOptions(int(bits["w"]), int(bits["a"]), balanced=bool(bits["balanced"])),
        ("abq-w6a6", "abq-w4a4", "abq-w2*a8"),
        "learned under losses that keep distribution and attention; * balanced codes",
    ),
    _Family(
        r"quarot-w(?P<w>[2-8]|16)a(?P<a>[2-8]|16)",
        QuaRot,
        lambda bits: QuaRotOptions(int(bits["w"]), int(bits["a"])),
        ("quarot-w6a6", "quarot-w4a4"),
        "rotated by Hadamard matrices against outliers, then rounded to nearest",
    ),
    _Family(
        r"spinquant-w(?P<w>[2-8]|16)a(?P<a>[2-8]|16)",
        SpinQuant,
        lambda bits: SpinQuantOptions(int(bits["w"]), int(bits["a"])),
        ("spinquant-w4a4",),
        "rotated by a matrix learned on the Cayley manifold, then rounded to nearest",
    ),
    _Family(
        r"duquant-w(?P<w>[2-8]|16)a(?P<a>[2-8]|16)",
        DuQuant,
        lambda bits: DuQuantOptions(int(bits["w"]), int(bits["a"])),
        ("duquant-w6a6", "duquant-w4a4"),
        "smoothed, rotated in blocks built from outliers of a text, then rounded to nearest",
    ),
    _Family(
        r"dgq-w4a8",
        Dgq,
        lambda bits: DgqOptions(),
        ("dgq-w4a8", "dgq-w4a8[static=true]", "dgq-w4a8[search=false]"),
        "4-bit groups that lift to INT8 rows, outlier channels clipped",
    ),
    _Family(
        r"dual-w6a8",
        TwoLevel,
        lambda bits: TwoLevelOptions(),
        ("dual-w6a8", "dual-w6a8[search=weight]"),
        "6-bit groups that lift to INT8 rows by an integer of 1 to 4",
    ),
    _Family(
        r"atom-w(?P<w>[2-8])a(?P<a>[2-8])",
        Atom,
        lambda bits: AtomOptions(w_bits=int(bits["w"]), a_bits=int(bits["a"])),
        ("atom-w4a4",),
        "outlier channels in 8 bits, the others in groups of 4, keys and values in 4",
    ),
)


def names() -> tuple[str, ...]:
    """Return examples of names of each family, in the registry's order."""
    return (*(name for family in _FAMILIES for name in family.examples), *_own())


def named_schemes() -> tuple[NamedScheme, ...]:
    """Return the schemes of all these examples, in the registry's order."""
    summaries = {name: family.summary for family in _FAMILIES for name in family.examples}
    rows = []
    for name in names():
        scheme = resolve(name)
        layers = layer_kernels(scheme, gated=True), layer_kernels(scheme, gated=False)
        rows.append(NamedScheme(scheme, summaries.get(name, scheme.source), *layers))
    return tuple(rows)


def layer_kernels(scheme: Scheme, *, gated: bool) -> tuple[LayerKernel, ...]:
    """Return formats and kernels of a block's layers; layers with equal formats share an entry."""
    kinds_of: dict[LayerFormats, list[str]] = {}
    for kind in _KINDS[gated]:
        kinds_of.setdefault(scheme.layer_formats(kind, gated), []).append(kind)
    rows = []
    for formats, kinds in kinds_of.items():
        operand_formats = formats.weight, formats.activation
        rows.append(
            LayerKernel(
                tuple(kinds),
                formats,
                kernel_label(*operand_formats) or "",
                no_kernel_reason(*operand_formats),
            )
        )
    return tuple(rows)


def resolve(name: str) -> Scheme:
    """Return the scheme of a name; built-in schemes take precedence over user-defined ones.

    Raises QuantizeError with similar names or the known options, or as own_schemes.
    """
    parsed = _NAME.fullmatch(name.strip())
    if parsed is None:
        raise QuantizeError(unknown("scheme", name, names()))

    def changed(options: SchemeOptions) -> SchemeOptions:
        return _with_cache(_with(options, parsed["options"] or "", name), parsed["kv_bits"], name)

    for family in _FAMILIES:
        if bits := re.fullmatch(family.pattern, parsed["family"]):
            return family.scheme(name.strip(), changed(family.options(bits.groupdict())))
    own = _own().get(parsed["family"])
    if own is not None:
        return scheme_of(own, name.strip(), changed(SchemeOptions()))
    if parsed["family"] in _RENAMED:
        raise QuantizeError(f"no scheme {name!r}: it is named {_RENAMED[parsed['family']]}")
    raise QuantizeError(unknown("scheme", name, names()))


def add_schemes_from(file: str) -> tuple[str, ...]:
    """Add the schemes of a Python file (see own_schemes); returns their names.

    Raises QuantizeError if there is no such file, it fails, has no scheme, or one with a known
    name.
    """
    added = use_schemes_from(file)
    _own()
    return added


def _own() -> dict[str, OwnScheme]:
    own = own_schemes()
    for name in own:
        if any(re.fullmatch(family.pattern, name) for family in _FAMILIES):
            raise QuantizeError(f"an own scheme is called {name}, as one of ours: rename it")
    return own


def without_cache(name: str) -> str:
    """Return the name without `+kv8`, which doesn't affect the weights."""
    return name.strip().rpartition("+kv")[0] or name.strip()


def _with_cache(options: SchemeOptions, kv_bits: str | None, name: str) -> SchemeOptions:
    if kv_bits is not None:
        options = replace(options, kv_bits=int(kv_bits) if kv_bits.isdecimal() else 0)
    if options.kv_bits not in KV_BITS:
        bits = options.kv_bits if kv_bits is None else kv_bits
        raise QuantizeError(
            f"a KV cache has 16, 8 or 4 bits, got {bits}: write {without_cache(name)}+kv8"
        )
    return options


def _with(options: SchemeOptions, text: str, name: str) -> SchemeOptions:
    known = {field.name: field for field in fields(options)}
    types = get_type_hints(type(options))
    changes: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if key not in known:
            raise QuantizeError(unknown(f"option of {name} named", key, known))
        if not equals:
            raise QuantizeError(f"option {key} of {name} needs a value: {key}=…")
        changes[key] = _read(value, types[key], key)
    try:
        return replace(options, **changes)
    except ValueError as error:
        raise QuantizeError(f"{name}: {error}") from error


def _read(text: str, kind: Any, key: str) -> Any:
    """Parse an option's value; `none`, `true` and `false` are words, a tuple is a+b+c."""
    choices = get_args(kind) if get_origin(kind) is UnionType else (kind,)
    if text.lower() == "none" and type(None) in choices:
        return None
    for choice in choices:
        if choice is bool:
            if text.lower() in ("true", "false"):
                return text.lower() == "true"
        elif get_origin(choice) is tuple:
            return tuple(filter(None, text.split("+")))
        elif choice in (int, float, str):
            try:
                return choice(text)
            except ValueError:
                continue
    raise QuantizeError(f"option {key} can't be {text!r}")
