"""Comparison of a folder with that of the original model, apart from weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from flexq_bench.accuracy.artefacts.chat import chat_differences, conversation_texts
from flexq_bench.accuracy.artefacts.differences import Difference, equal_values
from flexq_bench.accuracy.artefacts.settings import (
    config_differences,
    generation_differences,
    read_settings,
)
from flexq_bench.accuracy.artefacts.tokenizers import tokenizer_differences, vocabulary_differences
from flexq_bench.accuracy.errors import AccuracyError
from flexq_bench.accuracy.loading import load_tokenizer, tokenizer_at
from flexq_bench.checkpoints.model_source import quiet_transformers
from flexq_bench.errors import UsageError, one_line
from flexq_bench.schemes.model_files import CONFIG, model_at, read_json, safetensors_files

# Files that determine inputs, and aren't covered by the tokenizer's and the configuration's.
_PROCESSORS = ("preprocessor_config.json", "processor_config.json", "chat_template.json")
# Weights that programs add (transformers, if peft is installed; vLLM, without an index), or read in
# place of the model's.
_OTHER_WEIGHTS = (
    *("adapter_config.json", "params.json", "*.safetensors"),
    *("pytorch_model*.bin", "consolidated*.pth", "*.gguf"),
)


def compare_folders(
    checkpoint: Path, original: Path, texts: Sequence[str] = (), *, seed: int = 0
) -> list[Difference]:
    """Return all differences of a model's folder, or GGUF file, from the original's.

    Compared are config.json, generation_config.json, the tokenizer, chat templates, and programs.
    texts: that the tokenizers read, in addition to samples and random texts (seed). Raises
    UsageError if the original can't be read; a checkpoint that can't be read is a difference.
    """
    with quiet_transformers():
        theirs, other_tokenizer = read_settings(original), _tokenizer(original)
        differences: list[Difference] = []
        try:
            ours = read_settings(checkpoint)
        except UsageError as error:
            differences.append(Difference("config.unreadable", one_line(error)))
        else:
            differences += config_differences(ours, theirs)
            differences += generation_differences(ours, theirs)
        try:
            tokenizer = _tokenizer(checkpoint)
        except (AccuracyError, UsageError) as error:
            differences.append(Difference("tokenizer.unreadable", one_line(error)))
        else:
            more = [*texts, *conversation_texts(other_tokenizer)]
            differences += tokenizer_differences(
                tokenizer, other_tokenizer, more, positions=theirs.positions, seed=seed
            )
            differences += chat_differences(tokenizer, other_tokenizer)
        differences += _files(checkpoint, original)
        differences += vocabulary_differences(checkpoint, original, other_tokenizer)
    return differences


def _tokenizer(path: Path) -> object:
    if (path / CONFIG).is_file():
        return tokenizer_at(path)
    return load_tokenizer(model_at(path))


def _files(checkpoint: Path, original: Path) -> Iterator[Difference]:
    """Differences of programs and other weights, and of processors that both folders have."""
    if not checkpoint.is_dir() or not original.is_dir():
        return
    for file in sorted(checkpoint.rglob("*.py")):
        name = file.relative_to(checkpoint)
        other = original / name
        if not other.is_file():
            yield Difference(f"files.{name}", "a program that the original does not have")
        elif file.read_bytes() != other.read_bytes():
            yield Difference(f"files.{name}", "another program than the original's")
    own = _weights(checkpoint)
    for file in (path for each in _OTHER_WEIGHTS for path in sorted(checkpoint.glob(each))):
        if file not in own and not (original / file.name).exists():
            yield Difference(f"files.{file.name}", "other weights, that the original does not have")
    for processor in _PROCESSORS:
        ours, theirs = checkpoint / processor, original / processor
        both = ours.is_file() and theirs.is_file()
        if both and not equal_values(read_json(ours), read_json(theirs)):
            yield Difference(f"files.{processor}", "other settings than the original's")


def _weights(folder: Path) -> tuple[Path, ...]:
    """The weights of a folder that the gate reads; of a broken one, which fails itself, all."""
    try:
        return safetensors_files(folder)
    except UsageError:
        return tuple(folder.glob("*.safetensors"))
