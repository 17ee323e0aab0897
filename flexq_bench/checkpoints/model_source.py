"""A model to be quantized: its configuration, and its tensors one block at a time."""

from __future__ import annotations

import contextlib
import io
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flexq_bench.checkpoints.conversion import ConvertedTensors
from flexq_bench.checkpoints.errors import HEAD, CheckpointError, own_head_error
from flexq_bench.checkpoints.gguf_config import (
    check_tensors_used,
    complete_config,
    headers_read_once,
    nearest_format,
)
from flexq_bench.checkpoints.layers import all_finite
from flexq_bench.checkpoints.safetensors_io import TensorInfo, read_header, with_digest
from flexq_bench.errors import library_reason
from flexq_bench.kernels.formats import NumberFormat
from flexq_bench.schemes.linear_layers import Origin
from flexq_bench.schemes.model_files import CONFIG, ModelFiles, merged_tensors

Named = tuple[str, torch.Tensor]
_GENERATION = "generation_config.json"
_AGAIN = "download it again"
_IN_A_BLOCK = re.compile(r"layers\.\d+\..*(weight|bias)$")
_AUTO_CLASSES = (
    *("AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModelForMultimodalLM"),
)
# Classes that are no decoders of text: they see the tokens after a masked one, or predict others.
_MASKED = ("ForMaskedLM", "ForPreTraining")
_OTHER_TASKS = ("Classification", "QuestionAnswering", "MultipleChoice", "RewardModel")
_MAX_READ_BYTES = 1 << 20  # of a GGUF tensor, before it is dequantized
# Of Hugging Face's configuration: the storage of the weights, which no longer applies.
_STORAGE_KEYS = ("dtype", "torch_dtype", "quantization_config", "_name_or_path")


class ModelSource(ABC):
    """Tensors of a dense model by the names that transformers gives them, read on demand.

    is_synthetic: they are random, of a model's true shapes.
    """

    name: str
    is_synthetic = False

    @abstractmethod
    def config(self) -> Any:
        """The transformers configuration, PretrainedConfig. Raises CheckpointError if it is
        invalid.
        """

    @abstractmethod
    def bind(self, model: Any, origins: Mapping[str, Origin]) -> None:
        """Set the model, on the meta device, before its tensors are read.

        origins: of the weights that transformers stores in another form (linear_layers). Raises
        CheckpointError unless all tensors are there in the model's shapes.
        """

    @abstractmethod
    def read(self, names: Iterable[str], device: torch.device) -> Iterator[Named]:
        """These tensors, as stored. Raises CheckpointError with one line."""

    def read_halves(self, names: Iterable[str], device: torch.device) -> Iterator[Named]:
        """Read as `read`, but convert large computed tensors to FP16 at once, if they fit it."""
        return self.read(names, device)

    @abstractmethod
    def companions(self, scratch: Path) -> list[Path]:
        """The model's files other than weights: the tokenizer's, generation_config.

        scratch: an empty folder, for files that must be created.
        """

    def config_dict(self) -> dict[str, Any]:
        """Return the model's fields of a checkpoint's config.json, with FP16 as the data type."""
        described = self._described()
        fields = {key: value for key, value in described.items() if key not in _STORAGE_KEYS}
        return dict(
            sorted({**fields, "_name_or_path": self.name, "torch_dtype": "float16"}.items())
        )

    def _described(self) -> dict[str, Any]:
        """Hugging Face's config.json of the model."""
        config = self.config()
        described: dict[str, Any] = config.to_dict()
        return described


class FolderSource(ModelSource):
    """Safetensors of a Hugging Face folder, read without memory mapping."""

    def __init__(self, files: ModelFiles) -> None:
        self.name = files.name
        self._files = files
        self._infos = merged_tensors(files.weights, read_header)
        self._tensors: ConvertedTensors | None = None

    def config(self) -> Any:
        try:
            config = read_config(self._files)
        # any exception, from an unknown kind of model to a field of another type
        except Exception as error:
            raise CheckpointError(f"can't load {self.name}: {library_reason(error)}") from error
        check_block_count(self.name, len(self._files.tensors), config)
        return config

    def _described(self) -> dict[str, Any]:
        return self._files.config()

    def companions(self, scratch: Path) -> list[Path]:
        generation = self._files.folder / _GENERATION
        return [*self._files.tokenizer_files(), *([generation] if generation.is_file() else [])]

    def bind(self, model: Any, origins: Mapping[str, Origin]) -> None:
        tensors = ConvertedTensors(model, origins, self._infos)
        self._check_tied_head(model, tensors.stored)
        check_tensors(self.name, model, tensors.shapes)
        passed_over = model._keys_to_ignore_on_load_unexpected or ()
        check_no_more(
            self.name,
            [
                name
                for name in tensors.unused
                if name.startswith(f"{model.base_model_prefix}.")
                and not any(re.search(pattern, name) for pattern in passed_over)
            ],
        )
        self._tensors = tensors

    def _check_tied_head(self, model: Any, stored: Mapping[str, TensorInfo]) -> None:
        """Raise CheckpointError if there is an output head of its own although the configuration
        ties it.
        """
        for name, embedding in tied_tensors(model).items():
            head, first = stored.get(name), stored.get(embedding)
            if head is None or first is None:
                continue
            ours, theirs = with_digest(head, name), with_digest(first, embedding)
            if (ours.dtype, ours.shape, ours.digest) != (theirs.dtype, theirs.shape, theirs.digest):
                raise own_head_error(self.name, embedding, name)

    def read(self, names: Iterable[str], device: torch.device) -> Iterator[Named]:
        assert self._tensors is not None
        return self._tensors.read(names, device)


class GgufSource(ModelSource):
    """A GGUF file, dequantized tensor by tensor."""

    def __init__(self, files: ModelFiles) -> None:
        self.name = files.name
        self._files = files
        self._path = files.weights[0]
        self._stored: dict[str, Any] = {}  # gguf.ReaderTensor, by transformers' name
        self._processor: Any = None
        self._config: Any = None  # reading it takes as long as its vocabulary
        self._header: Any = None  # reading it takes as long, too

    def config(self) -> Any:
        from transformers import AutoConfig

        if self._config is None:
            with self._readable():
                config = AutoConfig.from_pretrained(
                    self._path.parent, gguf_file=self._path.name, trust_remote_code=False
                )
                complete_config(config, self._reader(), self._path)
            self._config = config
        return self._config

    def formats(self, model: Any) -> dict[str, NumberFormat]:
        """The formats nearest to the codes of a model's tensors, by name; without dense ones.

        Raises CheckpointError if a tensor of the file is not part of the model.
        """
        with self._readable():
            names, tensors = self._names(model), self._reader().tensors
            check_tensors_used(names, self._reader(), self._path)
        formats = {}
        for tensor in tensors:
            number, name = nearest_format(tensor.tensor_type.name), str(tensor.name)
            if number is not None:  # names of experts, packed into one tensor, lack the end
                formats[names.get(name) or names[name.removesuffix(".weight")]] = number
        return formats

    def companions(self, scratch: Path) -> list[Path]:
        from transformers import AutoTokenizer

        with self._readable():
            tokenizer = AutoTokenizer.from_pretrained(
                self._path.parent, gguf_file=self._path.name, trust_remote_code=False
            )
            tokenizer.save_pretrained(scratch)
        return sorted(scratch.iterdir())

    def bind(self, model: Any, origins: Mapping[str, Origin]) -> None:
        if origins:
            raise CheckpointError(
                f"{self._path.name} is a {type(model).__name__}, which is not quantized from a "
                "GGUF file: give its folder of safetensors"
            )
        with self._readable():
            names = self._names(model)
            self._stored = {
                names[tensor.name]: _GgufTensor(self._path, tensor)
                for tensor in self._reader().tensors
                if tensor.name in names
            }
            check_tensors_used(names, self._reader(), self._path)
        self._header = None  # its list of tokens takes tens of MiB
        check_tensors(self.name, model, {name: t.shape for name, t in self._stored.items()})

    def read(self, names: Iterable[str], device: torch.device) -> Iterator[Named]:
        for name in names:
            yield name, self._values(name, np.dtype(np.float32)).to(device)

    def read_halves(self, names: Iterable[str], device: torch.device) -> Iterator[Named]:
        for name in names:
            matrix = len(self._stored[name].shape) > 1  # operations on norms need FP32
            values = self._values(name, np.dtype(np.float16 if matrix else np.float32))
            if matrix and not all_finite(values):
                values = self._values(name, np.dtype(np.float32))
            yield name, values.to(device)

    def _values(self, name: str, dtype: np.dtype[Any]) -> torch.Tensor:
        stored = self._stored[name]
        with self._readable(), np.errstate(over="ignore"):
            values = stored.values(dtype)
            return torch.from_numpy(self._processor.process(values, stored.name).weights)

    def _reader(self) -> Any:
        """The file's header, gguf.GGUFReader: its tensors are mapped, not read."""
        from gguf import GGUFReader

        if self._header is None:
            self._header = GGUFReader(self._path)
        return self._header

    def _names(self, model: Any) -> dict[str, str]:
        """The model's tensors by those of the file."""
        from transformers.modeling_gguf_pytorch_utils import (
            TENSOR_PROCESSORS,
            TensorProcessor,
            get_gguf_hf_weights_map,
            read_field,
        )

        architecture = read_field(self._reader(), "general.architecture")[0]
        kind = TENSOR_PROCESSORS.get(architecture, TensorProcessor)
        self._processor = kind(config=model.config.to_dict())
        names: dict[str, str] = get_gguf_hf_weights_map(_AsOne(model), self._processor)
        return names

    @contextmanager
    def _readable(self) -> Iterator[None]:
        """Convert exceptions of the readers for a damaged file to one line."""
        try:
            with quiet_transformers(), headers_read_once():
                yield
        except CheckpointError:
            raise
        except ImportError as error:
            raise CheckpointError(
                f"{self._path.name} needs gguf: pip install 'flexq-bench[accuracy]'"
            ) from error
        except Exception as error:
            raise CheckpointError(
                f"can't read {self._path} ({library_reason(error)}): {_AGAIN}"
            ) from error


class _AsOne:
    """A model without parts, because transformers would create the same table of names for each
    part.
    """

    def __init__(self, model: Any) -> None:
        self.config, self.state_dict = model.config, model.state_dict

    def named_children(self) -> tuple[()]:
        return ()


class _GgufTensor:
    """Location of a tensor in a GGUF file; each row consists of whole blocks of codes."""

    def __init__(self, path: Path, tensor: Any) -> None:
        self._path, self.name, self._kind = path, str(tensor.name), tensor.tensor_type
        self._start, self._bytes = int(tensor.data_offset), int(tensor.n_bytes)
        self.shape = tuple(int(length) for length in reversed(tensor.shape))

    def values(self, dtype: np.dtype[Any]) -> Any:
        """The whole tensor, [rows, K] or [K], dequantized some rows at a time."""
        from gguf import dequantize

        rows = self.shape[0] if len(self.shape) > 1 else 1
        width = self._bytes // rows
        together = max(1, _MAX_READ_BYTES // width)
        values = np.empty((rows, self.shape[-1]), dtype=dtype)
        with self._path.open("rb") as file:
            file.seek(self._start)
            for start in range(0, rows, together):
                count = min(together, rows - start)
                raw = np.frombuffer(file.read(count * width), dtype=np.uint8)
                values[start : start + count] = dequantize(raw.reshape(count, width), self._kind)
        return values.reshape(self.shape)


def open_source(files: ModelFiles) -> ModelSource:
    """The tensors of a model on this machine. Raises CheckpointError if a file is truncated."""
    return FolderSource(files) if files.gguf is None else GgufSource(files)


def read_config(files: ModelFiles) -> Any:
    """Read a folder's transformers configuration, PretrainedConfig. Raises any exception."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(files.folder, trust_remote_code=False)


def tied_tensors(model: Any) -> dict[str, str]:
    """Names of tensors that are others of the model, and those others: a tied output head."""
    tied = getattr(model, "all_tied_weights_keys", None)
    if tied is not None:
        return dict(tied)
    if not getattr(model.config, "tie_word_embeddings", False):
        return {}
    words = model.get_input_embeddings().weight
    return {HEAD: next(name for name, p in model.named_parameters() if p is words)}


def expected_tensors(model: Any) -> dict[str, tuple[int, ...]]:
    """Shape of each tensor that a model needs, by name, without tied ones."""
    tied = tied_tensors(model)
    computed = getattr(model, "_keys_to_ignore_on_load_missing", None) or ()
    return {
        name: tuple(tensor.shape)
        for name, tensor in model.state_dict().items()
        if name not in tied and not any(re.search(pattern, name) for pattern in computed)
    }


def auto_class(config: Any) -> Any:
    """The automatic class of transformers for a configuration's decoder of text.

    A multimodal model without a class for text alone is taken whole. Decoders that have no
    automatic class are found by `architectures`. Raises ValueError if there is none, and
    CheckpointError for a model that predicts no next token from those before it.
    """
    import transformers

    reasons = ["it has an encoder"] if config.is_encoder_decoder else []
    for name in config.architectures or ():
        if name.endswith((*_MASKED, *_OTHER_TASKS)):
            of_class = "masked tokens" if name.endswith(_MASKED) else "no tokens"
            reasons.insert(0, f"{name} predicts {of_class}")
    if reasons:
        raise CheckpointError(
            f"a {config.model_type} is no decoder of text ({reasons[0]}): only its shapes can be "
            "measured (sweep --config)"
        )
    for name in _AUTO_CLASSES:
        auto = getattr(transformers, name, None)
        if auto is not None and type(config) in auto._model_mapping:
            return auto
    for name in config.architectures or ():
        own: Any = getattr(transformers, name, None)
        if getattr(own, "config_class", None) is type(config) and own.can_generate():
            return own
    raise ValueError(f"transformers has no decoder of type {config.model_type}")


def check_tensors(name: str, model: Any, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise CheckpointError unless these are the model's tensors: shapes by name."""
    expected = expected_tensors(model)
    missing = sorted(set(expected) - set(shapes))
    if missing:
        raise CheckpointError(missing_weights(name, model, missing))
    for tensor, shape in expected.items():
        if shapes[tensor] != shape:
            raise CheckpointError(
                f"{name}: {tensor} is {list(shapes[tensor])}, its {CONFIG} asks for {list(shape)}: "
                f"{_AGAIN}"
            )


def missing_weights(name: str, model: Any, missing: Collection[str]) -> str:
    """Explain that a model has no tensors of these names. name: of the model."""
    classes = model.config.architectures or ()
    if {*missing} == {HEAD} and classes and classes[0].endswith("Model"):
        return f"{name} is a {classes[0]}, which has no output head: give the whole model"
    return f"{name} lacks {len(missing)} weights of its architecture ({min(missing)} …): {_AGAIN}"


def check_no_more(name: str, unused: Collection[str]) -> None:
    """Raise CheckpointError if there are weights of blocks that the architecture does not have.

    unused: stored tensors that were not read.
    """
    extra = sorted(tensor for tensor in unused if _IN_A_BLOCK.search(tensor))
    if extra:
        raise CheckpointError(
            f"{name} has {len(extra)} weights that its {CONFIG} has no place for ({extra[0]} …): "
            f"it would be used in part; {_AGAIN}"
        )


def check_block_count(name: str, tensors: int, config: Any) -> None:
    """Raise CheckpointError unless a folder has tensors for all blocks of config.json.

    Called before the model is built, because otherwise a module for each block would be created
    before a missing one is noticed.
    """
    blocks = getattr(config.get_text_config(decoder=True), "num_hidden_layers", None)
    if isinstance(blocks, int) and not 0 < blocks <= tensors:
        raise CheckpointError(
            f"{name} has {tensors} weights, and its {CONFIG} asks for {blocks} blocks: {_AGAIN}"
        )


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Suppress progress bars and messages of transformers: errors are exceptions."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    bars = logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        # its progress bar for GGUF files can't be switched off
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
