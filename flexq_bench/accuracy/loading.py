"""Loading of a model with its tokenizer, and checks that both are complete and match."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from flexq_bench.accuracy.errors import AccuracyError
from flexq_bench.accuracy.perplexity import GPTQ_CONTEXT
from flexq_bench.checkpoints.errors import CheckpointError, own_head_error
from flexq_bench.checkpoints.gguf_config import headers_read_once
from flexq_bench.checkpoints.layers import is_finite_or_bound
from flexq_bench.checkpoints.model_source import (
    GgufSource,
    auto_class,
    check_block_count,
    check_no_more,
    missing_weights,
    quiet_transformers,
    read_config,
)
from flexq_bench.errors import library_reason
from flexq_bench.kernels.formats import NumberFormat
from flexq_bench.schemes.linear_layers import linear_origins
from flexq_bench.schemes.model_files import CONFIG, ModelFiles, find_model

# Up to about here two threads take as long as one on idle cores, and many times as long if another
# process runs on one of them, because each operation waits for both.
_SMALL_MODEL = 5_000_000  # parameters
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A causal language model of transformers in evaluation mode, with its tokenizer.

    content_hash: of its files. dtype: of its weights. formats: of those that are codes in the files
    and numbers here, the nearest formats, by name.
    """

    name: str
    content_hash: str
    model: Any  # transformers.PreTrainedModel
    tokenizer: Any  # transformers.PreTrainedTokenizerBase
    dtype: str
    formats: Mapping[str, NumberFormat] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        """Device of the model's weights."""
        device: torch.device = next(self.model.parameters()).device
        return device

    def context(self, requested: int | None = None) -> int:
        """Return the tokens of a segment; requested None: as GPTQ, limited by the model.

        Raises AccuracyError if the model has fewer positions.
        """
        return segment_length(self.name, self.model.config, requested)


def segment_length(name: str, config: Any, requested: int | None = None) -> int:
    """Return the tokens of a segment for this configuration; see LoadedModel.context."""
    own = getattr(config, "max_position_embeddings", None)
    if requested is not None and own is not None and requested > own:
        raise AccuracyError(
            f"{name} has {own} positions, segments of {requested} tokens don't fit: ask for {own} "
            "at most"
        )
    return int(requested or min(own or GPTQ_CONTEXT, GPTQ_CONTEXT))


@contextmanager
def suitable_threads(model: LoadedModel) -> Iterator[None]:
    """Compute operations of a small model on a CPU in one thread."""
    threads = torch.get_num_threads()
    parameters = sum(parameter.numel() for parameter in model.model.parameters())
    if model.device.type == "cpu" and parameters < _SMALL_MODEL:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def chosen_dtype(name: str | None, device: torch.device) -> str:
    """Check a name of DTYPES; None: float16 on a GPU, float32 on a CPU. Raises AccuracyError."""
    if name is not None and name not in DTYPES:
        raise AccuracyError(f"no data type {name!r}: there are {', '.join(DTYPES)}")
    return name or ("float16" if device.type == "cuda" else "float32")


def load_model(spec: str, *, device: torch.device, dtype: str | None = None) -> LoadedModel:
    """Load a model. spec: as in find_model.

    dtype: of DTYPES; None: float16 on a GPU, float32 on a CPU, where others are slow. Raises
    UsageError in one line if there is no such model, it is truncated, its tokenizer doesn't match,
    its weights are not those of its architecture, or a weight is not a number.
    """
    chosen = chosen_dtype(dtype, device)
    files = find_model(spec)
    with quiet_transformers(), headers_read_once():
        _check_config(files)
        tokenizer = load_tokenizer(files)
        model, formats = _load_weights(files, DTYPES[chosen])
    check_vocabulary(files.name, model, tokenizer)
    model = model.to(device).eval()
    _check_numbers(files, model, chosen)
    return LoadedModel(files.name, files.content_hash(), model, tokenizer, chosen, formats)


def load_tokenizer(files: ModelFiles) -> Any:
    """Load the tokenizer next to the weights. Raises AccuracyError if there is none."""
    return tokenizer_at(files.folder, files.gguf)


def tokenizer_at(folder: Path, gguf: str | None = None) -> Any:
    """Load the tokenizer of a folder, or of its GGUF file. Raises AccuracyError if it has none."""
    from transformers import AutoTokenizer

    try:
        with headers_read_once():
            return AutoTokenizer.from_pretrained(folder, trust_remote_code=False, **_gguf(gguf))
    except Exception as error:  # of any class: tokenizer files differ in their errors
        if gguf is not None:
            raise AccuracyError(
                f"can't read {folder / gguf} ({library_reason(error)}): download it again"
            ) from error
        raise AccuracyError(
            f"{folder} has no tokenizer that transformers reads ({library_reason(error)}): put "
            "the model's tokenizer.json and tokenizer_config.json there"
        ) from error


def _check_config(files: ModelFiles) -> None:
    """Check the configuration first, because it determines how the tokenizer is loaded."""
    if files.gguf is not None:
        return  # a GGUF file contains everything; its first reader reports errors
    try:
        config = read_config(files)
    except Exception as error:  # of any class, for example an unknown model type
        raise AccuracyError(
            f"can't load {files.name}: {library_reason(error)}: check its {CONFIG}"
        ) from error
    check_block_count(files.name, len(files.tensors), config)


def _load_weights(files: ModelFiles, dtype: torch.dtype) -> tuple[Any, dict[str, NumberFormat]]:
    """The model, and the formats of LoadedModel."""
    source = None if files.gguf is None else GgufSource(files)
    try:
        config = read_config(files) if source is None else source.config()
        model, info = auto_class(config).from_pretrained(
            files.folder,
            config=None if source is None else config,
            dtype=dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # mismatches are reported below
            trust_remote_code=False,
            use_safetensors=files.gguf is None or None,  # pickled files may run code
            **_gguf(files.gguf),
        )
    except CheckpointError as error:
        raise AccuracyError(f"can't load {files.name}: {error}") from error
    except Exception as error:  # of any class, for example an unknown architecture
        raise AccuracyError(
            f"can't load {files.name}: {library_reason(error)}: check its {CONFIG} and weights"
        ) from error
    if info["mismatched_keys"]:
        name, theirs, ours = min(info["mismatched_keys"])
        raise AccuracyError(
            f"{files.name}: {name} is {list(theirs)}, its {CONFIG} asks for {list(ours)}: download "
            "it again"
        )
    if info["missing_keys"]:
        raise AccuracyError(missing_weights(files.name, model, info["missing_keys"]))
    blocks = f"{model.base_model_prefix}."
    unused = [name for name in info["unexpected_keys"] if name.startswith(blocks)]
    check_no_more(files.name, unused)
    formats = {} if source is None else source.formats(model)
    _check_ties(files.name, model)
    # transformers marks a dequantized model as quantized, so it could not be saved or changed.
    model.config.quantization_config = None
    del model.config.quantization_config
    origins = linear_origins(model).items()
    return model, formats | {n: formats[o.name] for n, o in origins if o.name in formats}


def _check_ties(name: str, model: Any) -> None:
    """Raise CheckpointError if tensors differ that are one by the configuration: a tied head."""
    asked = getattr(model, "get_expanded_tied_weights_keys", None)  # since transformers 5
    for tied, embedding in ({} if asked is None else asked(all_submodels=True)).items():
        if tied not in model.all_tied_weights_keys:
            raise own_head_error(name, embedding, tied)


def check_vocabulary(name: str, model: Any, tokenizer: Any) -> None:
    """Raise AccuracyError if the tokenizer has ids beyond the model's embeddings."""
    rows = model.get_input_embeddings().weight.shape[0]
    last, largest = max(tokenizer.get_vocab().items(), key=lambda item: item[1], default=("", -1))
    if largest < 0 or largest >= rows:
        raise AccuracyError(
            f"the tokenizer of {name} doesn't fit it: its largest token is {largest} "
            f"({last!r}), the model has embeddings for {rows} tokens; put the model's own "
            "tokenizer there"
        )


def _check_numbers(files: ModelFiles, model: Any, dtype: str) -> None:
    for name, tensor in model.state_dict().items():
        if not is_finite_or_bound(tensor):
            raise AccuracyError(
                f"{files.name}: {name} holds NaN or infinity in {dtype}: download the model again, "
                "or take a --dtype of more range"
            )


def _gguf(file: str | None) -> dict[str, str]:
    return {} if file is None else {"gguf_file": file}
