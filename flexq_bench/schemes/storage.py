"""Storage of a quantized model in one safetensors file: its header is JSON, nothing in it is code.

The file holds the state of all blocks, and in its header what each site's layer is beside its
tensors. Embeddings, final norm and output head stay with the model that it was made from.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flexq_bench.schemes.activations import (
    ActivationQuantizer,
    DynamicActivation,
    MixedActivation,
    StaticActivation,
)
from flexq_bench.schemes.errors import QuantizeError
from flexq_bench.schemes.fake_quantization import FakeQuantizedLinear
from flexq_bench.schemes.model_map import ModelMap, linear_at, map_model, replace_module
from flexq_bench.schemes.scheme import Scheme
from kernels.formats import NumberFormat

FORMAT_VERSION = 1
_HEADER = "flexq-bench"


@dataclass(frozen=True, slots=True)
class StoredScheme:
    """Scheme, options and seed that a stored model was quantized with."""

    scheme: str
    version: int
    options: dict[str, Any]
    seed: int


def save_quantized(model: nn.Module, path: Path, scheme: Scheme, *, seed: int) -> None:
    """Write a model that `scheme` quantized with this seed; the file appears whole or not at all.

    Raises QuantizeError if the model holds no quantized layer or the folder can't be written.
    """
    from safetensors.torch import save_file

    layers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, FakeQuantizedLinear)
    }
    if not layers:
        raise QuantizeError("there is nothing to save: quantize the model first")
    prefix = _common_prefix(layers)
    tensors = {
        name: tensor.contiguous()
        for name, tensor in model.state_dict().items()
        if name.startswith(prefix)
    }
    header = {
        "format": FORMAT_VERSION,
        "scheme": scheme.name,
        "version": scheme.version,
        "options": asdict(scheme.options),
        "seed": seed,
        "base": _fingerprint(model, prefix),
        "sites": {name: _describe(layer) for name, layer in layers.items()},
    }
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    try:
        save_file(tensors, partial, metadata={_HEADER: json.dumps(header)})
        os.replace(partial, path)
    except OSError as error:
        raise QuantizeError(f"can't write {path}: {error}") from error
    finally:
        partial.unlink(missing_ok=True)


def load_quantized(model: nn.Module, path: Path) -> StoredScheme:
    """Make a dense model the quantized one that was saved; untouched if anything is wrong.

    Raises QuantizeError if there is no such file, it is cut off, damaged or newer than this
    program, or if it was made from another model.
    """
    layout = map_model(model)
    header, tensors = _read(path)
    prefix = f"{layout.names.blocks}."
    _check(header, tensors, model, layout, prefix, path)
    for name, described in header["sites"].items():
        replace_module(model, name, _layer(name, described, tensors, model))
    model.load_state_dict(tensors, strict=False)
    return StoredScheme(header["scheme"], header["version"], header["options"], header["seed"])


def _read(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            text = (file.metadata() or {}).get(_HEADER)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError as error:
        raise QuantizeError(f"no quantized model {path}: save one first") from error
    except (SafetensorError, OSError) as error:
        raise QuantizeError(
            f"{path} is cut off or damaged ({error}): make it again; no part of it is used"
        ) from error
    if text is None:
        raise QuantizeError(
            f"{path} is no result of flexq-bench: its header doesn't say the scheme"
        )
    header: dict[str, Any] = json.loads(text)
    if header.get("format") != FORMAT_VERSION:
        raise QuantizeError(
            f"{path} has format {header.get('format')}, this program reads {FORMAT_VERSION}: make "
            "it again"
        )
    return header, tensors


def _check(
    header: dict[str, Any],
    tensors: dict[str, torch.Tensor],
    model: nn.Module,
    layout: ModelMap,
    prefix: str,
    path: Path,
) -> None:
    if header["base"] != _fingerprint(model, prefix):
        raise QuantizeError(f"{path} was made from another model: load that one, or quantize anew")
    for name, tensor in model.state_dict().items():
        stored = tensors.get(name)
        if name.startswith(prefix) and (stored is None or stored.shape != tensor.shape):
            raise QuantizeError(f"{path} doesn't fit the model at {name}: make it again")
    unknown = set(header["sites"]) - {site.name for site in layout.sites}
    if unknown:
        raise QuantizeError(f"{path} has layers that the model lacks: {min(unknown)}")


def _layer(
    name: str, described: dict[str, Any], tensors: dict[str, torch.Tensor], model: nn.Module
) -> FakeQuantizedLinear:
    device = linear_at(model, name).weight.device
    return FakeQuantizedLinear(
        name,
        tensors[f"{name}.weight"],
        tensors.get(f"{name}.bias"),
        _activation(described["activation"]),
        input_scale=tensors.get(f"{name}.input_scale"),
        order=tensors.get(f"{name}.order"),
        output=_activation(described["output"]),
    ).to(device)


def _describe(layer: FakeQuantizedLinear) -> dict[str, Any]:
    return {"activation": _as_json(layer.activation), "output": _as_json(layer.output)}


def _as_json(activation: ActivationQuantizer | None) -> dict[str, Any] | None:
    if activation is None:
        return None
    return {"class": type(activation).__name__, **_fields(activation)}


def _fields(activation: ActivationQuantizer) -> dict[str, Any]:
    if isinstance(activation, MixedActivation):
        parts = [_as_json(part) for part in activation.parts]
        return {"widths": list(activation.widths), "parts": parts}
    return asdict(activation)


def _activation(described: dict[str, Any] | None) -> ActivationQuantizer | None:
    if described is None:
        return None
    if described["class"] == MixedActivation.__name__:
        return MixedActivation(
            tuple(described["widths"]), tuple(part and _simple(part) for part in described["parts"])
        )
    return _simple(described)


def _simple(described: dict[str, Any]) -> DynamicActivation | StaticActivation:
    number = NumberFormat(**described["format"])
    if described["class"] == DynamicActivation.__name__:
        return DynamicActivation(number)
    return StaticActivation(number, described["scale"], described["zero"])


def _common_prefix(layers: dict[str, FakeQuantizedLinear]) -> str:
    """`model.layers.` of `model.layers.0.mlp.up_proj`: the part before the first number."""
    first = next(iter(layers)).split(".")
    number = next(index for index, part in enumerate(first) if part.isdigit())
    return ".".join(first[:number]) + "."


def _fingerprint(model: nn.Module, prefix: str) -> str:
    """SHA-256 of the parameters outside the blocks, which no scheme touches."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        if not name.startswith(prefix):
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\0".encode())
            digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
