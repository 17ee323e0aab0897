"""Loading of a served model's tokenizer, and of the tokens that end an answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flexq_bench.accuracy.loading import load_tokenizer, tokenizer_at
from flexq_bench.checkpoints.folders import is_checkpoint
from flexq_bench.checkpoints.model_source import quiet_transformers
from flexq_bench.schemes.model_files import model_at, read_json
from flexq_bench.serving.text import Vocabulary

_GENERATION = "generation_config.json"


def load_vocabulary(path: Path) -> Vocabulary:
    """Load the tokenizer of a checkpoint, a model's folder or a .gguf file.

    Raises AccuracyError if there is none.
    """
    with quiet_transformers():
        if is_checkpoint(path):
            folder, tokenizer = path, tokenizer_at(path)
        else:
            files = model_at(path)
            folder, tokenizer = files.folder, load_tokenizer(files)
    return Vocabulary(tokenizer, _ends(folder, tokenizer))


def _ends(folder: Path, tokenizer: Any) -> frozenset[int]:
    """The tokenizer's end of text, and those of generation_config.json (chats have others)."""
    config = folder / _GENERATION
    stated = read_json(config).get("eos_token_id") if config.is_file() else None
    several = stated if isinstance(stated, list) else [stated]
    ends = [tokenizer.eos_token_id, *several]
    return frozenset(int(end) for end in ends if isinstance(end, int))
