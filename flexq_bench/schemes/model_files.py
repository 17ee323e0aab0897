"""Files of a model: found, checked for completeness and hashed before the model is loaded."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from flexq_bench.errors import UsageError, library_reason
from flexq_bench.schemes.strict_json import loads_strictly

CONFIG = "config.json"
_WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_HUB_FILES = ("*.safetensors", "*.json", "*.model", "*.txt")
_TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "vocab*", "merges.txt")
# Names that common exporters of integer weights write next to, or instead of, `weight`.
_PACKED = (
    *(".qweight", ".qzeros", ".weight_packed", ".weight_scale", ".weight_scale_inv"),
    *(".absmax", ".quant_state"),
)
_GGUF_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
_REAL = ("F16", "BF16", "F32", "F64")  # data types, in the names of safetensors
_QUANTIZED = ("quantization_config", "compression_config")  # in config.json

Tensor = TypeVar("Tensor")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a safetensors file that is not read yet."""

    path: Path
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model in a folder.

    gguf: name of the weight file if it is a GGUF file; else the weights are safetensors. tensors:
    of the safetensors files, by name; empty for a GGUF file.
    """

    name: str
    folder: Path
    gguf: str | None
    weights: tuple[Path, ...]
    tensors: Mapping[str, StoredTensor] = field(default_factory=dict)

    def config(self) -> dict[str, Any]:
        """The parsed config.json. Raises UsageError if it can't be read."""
        return read_json(self.folder / CONFIG)

    def tokenizer_files(self) -> list[Path]:
        """The tokenizer's files next to the weights, sorted by name."""
        return _files(self.folder, _TOKENIZER_FILES)

    def content_hash(self) -> str:
        """SHA-256 over names and contents of the weights, the configuration and the tokenizer."""
        described = [self.folder / CONFIG] if self.gguf is None else []
        return _content_hash({*self.weights, *described, *self.tokenizer_files()})


def find_model(spec: str) -> ModelFiles:
    """Find the files of a model: a folder, a .gguf file, or `owner/name` on the Hugging Face hub.

    Every safetensors file is checked for completeness. Raises UsageError in one line.
    """
    path = Path(os.path.expanduser(spec))
    if is_there(path):
        return model_at(path)
    if not _HUB_NAME.fullmatch(spec):
        raise UsageError(
            f"no model {spec}: give a folder with {CONFIG} and safetensors, a .gguf file, or the "
            "name of a model on the Hugging Face hub (owner/name)"
        )
    return _of_folder(_from_hub(spec), name=spec)


def is_there(path: Path) -> bool:
    """Return True if the path exists; False also for an invalid file name, such as one too long."""
    return os.path.exists(path)


def model_at(path: Path) -> ModelFiles:
    """Find the files of a model on this machine, as find_model. Raises UsageError in one line."""
    try:
        return _of_file(path) if path.is_file() else _of_folder(path)
    except PermissionError as error:
        raise UsageError(f"can't read {error.filename}: permission denied") from error


def _of_file(path: Path) -> ModelFiles:
    if path.suffix != ".gguf":
        raise UsageError(
            f"{path} is no model: give its folder, or a .gguf file; other files of weights may run "
            "code when they are read"
        )
    if part := _GGUF_PART.search(path.name):
        raise UsageError(
            f"{path.name} is part {int(part[1])} of {int(part[2])}: join them with "
            "llama-gguf-split --merge"
        )
    return ModelFiles(path.stem, path.parent, path.name, (path,))


def _of_folder(folder: Path, *, name: str | None = None) -> ModelFiles:
    name = name or folder.resolve().name
    if not (folder / CONFIG).is_file():
        quantized = sorted(folder.glob("*.gguf"))
        if len(quantized) == 1 or (quantized and all(_GGUF_PART.search(q.name) for q in quantized)):
            return _of_file(quantized[0])
        if quantized:
            names = ", ".join(file.name for file in quantized)
            raise UsageError(f"{folder} holds several models: name one of {names}")
        raise UsageError(f"{folder} holds no model: there is neither {CONFIG} nor a .gguf file")
    _check_config(folder / CONFIG)
    weights = safetensors_files(folder)
    tensors = merged_tensors(weights, _tensors)
    check_index(folder, {tensor: stored.path for tensor, stored in tensors.items()})
    return ModelFiles(name, folder, None, weights, tensors)


def class_name(config: Mapping[str, Any]) -> str:
    """Name of the model's class in transformers; empty if its configuration names none."""
    classes = config.get("architectures")
    return str(classes[0]) if isinstance(classes, list) and classes else ""


def _check_config(path: Path) -> None:
    config = read_json(path)
    for key in _QUANTIZED:
        if key in config and config[key] is not None:
            section = config[key]
            method = section.get("quant_method", key) if isinstance(section, dict) else section
            raise UsageError(
                f"{path.parent} is quantized already ({method}): give the model that it was made "
                "from"
            )


def safetensors_files(folder: Path) -> tuple[Path, ...]:
    """Return the weight files of a folder, which are complete. Raises UsageError in one line."""
    index = folder / _INDEX
    if index.is_file():
        named = sorted(set(_weight_map(index).values()))
        elsewhere = next((name for name in named if Path(name).name != name), None)
        if elsewhere is not None:
            raise UsageError(
                f"{index} names a file elsewhere, {elsewhere!r:.80}: download it again"
            )
        missing = [name for name in named if not os.path.isfile(folder / name)]
        if missing or not named:
            what = f"{', '.join(missing) or 'any file':.200}"
            raise UsageError(f"{index} lacks {what}: download the model again")
        if (folder / _WHOLE).is_file() and _WHOLE not in named:
            raise UsageError(
                f"{folder} has {_WHOLE} and an index of other files: programs read either, so "
                "remove one of both"
            )
        return tuple(folder / name for name in named)
    whole = folder / _WHOLE
    if whole.is_file():
        return (whole,)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UsageError(
            f"{folder} has no .safetensors file: convert its weights with save_pretrained of "
            "transformers (files of pickled weights are not read)"
        )
    if any("-of-" in path.name for path in files):
        raise UsageError(f"{folder} has parts of a model and no {_INDEX}: download it again")
    raise UsageError(f"{folder} has {files[0].name} and no {_WHOLE}: give it that name")


def check_index(folder: Path, files: Mapping[str, Path]) -> None:
    """Raise UsageError if the folder's index names another file for a tensor than has it.

    files: of each tensor of the folder, the file that has it.
    """
    index = folder / _INDEX
    for name, file in _weight_map(index).items() if index.is_file() else ():
        if name not in files or files[name].name != file:
            raise UsageError(
                f"{index} says that {file:.80} has {name:.120}, and it doesn't: download the model "
                "again"
            )


def _weight_map(index: Path) -> dict[str, str]:
    where = read_json(index).get("weight_map", {})
    if not isinstance(where, dict) or not all(isinstance(f, str) for f in where.values()):
        raise UsageError(f"{index} doesn't say which file has which weight: download it again")
    return where


def merged_tensors(
    files: Iterable[Path], read: Callable[[Path], Mapping[str, Tensor]]
) -> dict[str, Tensor]:
    """Merge the results of `read` for all files, by tensor name.

    Raises UsageError if two files have the same tensor, because either may be outdated.
    """
    merged: dict[str, Tensor] = {}
    for path in files:
        of_file = read(path)
        twice = min(merged.keys() & of_file.keys(), default=None)
        if twice is not None:
            raise UsageError(
                f"{path.parent} has {twice} in two files, one of them {path.name}: download it "
                "again"
            )
        merged |= of_file
    return merged


def _tensors(path: Path) -> dict[str, StoredTensor]:
    from safetensors import SafetensorError, safe_open

    stored: dict[str, StoredTensor] = {}
    packed = []
    try:
        path.open("rb").close()  # safetensors' error does not report missing permissions
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - it is no dictionary
                tensor = file.get_slice(name)
                stored[name] = StoredTensor(path, tuple(tensor.get_shape()))
                if name.endswith(_PACKED):
                    packed.append(name)
                elif name.endswith(".weight") and tensor.get_dtype() not in _REAL:
                    packed.append(f"{name} of type {tensor.get_dtype()}")
    except PermissionError:
        raise
    except (SafetensorError, OSError) as error:
        raise UsageError(
            f"{path} is cut off or damaged ({error}): download it again; no part of it is used"
        ) from error
    if packed:
        raise UsageError(
            f"{path} holds weights that are quantized already ({packed[0]}): give the model that "
            "it was made from"
        )
    return stored


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=list(_HUB_FILES)))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        raise UsageError(
            f"no model {name}: there is no such folder, and the Hugging Face hub gave none "
            f"({library_reason(error)}): check the name, or give a folder"
        ) from error


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object of a file. Raises UsageError if there is none."""
    try:
        content = loads_strictly(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"can't read {path}: {error}") from error
    if not isinstance(content, dict):
        raise UsageError(f"{path} holds no JSON object: download it again")
    return content


def hash_of_damaged(path: Path) -> str:
    """Hash the files of a model that may be damaged: as ModelFiles.content_hash, if it is whole."""
    if path.is_file():
        return _content_hash({path, *_files(path.parent, _TOKENIZER_FILES)})
    return _content_hash(_files(path, ("*.safetensors", "*.gguf", CONFIG, *_TOKENIZER_FILES)))


def _files(folder: Path, patterns: Iterable[str]) -> list[Path]:
    paths = {path for pattern in patterns for path in folder.glob(pattern)}
    return sorted(path for path in paths if path.is_file())


def _content_hash(paths: Iterable[Path]) -> str:
    files = [path for path in sorted(paths) if path.is_file()]
    digest = hashlib.sha256()
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        for path, hashed in zip(files, threads.map(_file_hash, files), strict=True):
            digest.update(f"{path.name}\0{hashed}\n".encode())
    return digest.hexdigest()


def _file_hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
