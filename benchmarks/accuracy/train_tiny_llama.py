"""Train examples/models/tiny-llama: a LLaMA of 0.65 million parameters, for any machine.

    python benchmarks/accuracy/train_tiny_llama.py examples/models/tiny-llama

The training text is the Python language reference of `help()` (pydoc_data.topics) and the
docstrings of the standard library, both of the Python that runs the script and under the PSF
licence. Every eighth topic is held out: it is written to heldout.txt, and its paragraphs are
removed from the training text. calibration.txt is the beginning of the training text, for
calibrated schemes. Takes about five minutes on one core; seeded.
"""

from __future__ import annotations

import argparse
import ast
import math
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

import torch
from output import say
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

END = "<|end|>"
VOCABULARY = 512
CONTEXT = 256
BATCH = 16
CALIBRATION_BYTES = 60_000
CONFIG = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=700)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)

    documents, held_out = read_documents()
    tokenizer = train_tokenizer(documents)
    tokens = torch.tensor([t for text in documents for t in (*tokenizer.encode(text), 0)])
    unseen = torch.tensor(tokenizer.encode(held_out))
    say(f"{tokens.numel():,} tokens to train on, {unseen.numel():,} held out")
    model = train(tokens, unseen, options.steps)

    options.folder.mkdir(parents=True, exist_ok=True)
    model.half().save_pretrained(options.folder)
    tokenizer.save_pretrained(options.folder)
    config = options.folder / "tokenizer_config.json"
    # The class by the name that every version of transformers knows.
    config.write_text(config.read_text().replace("TokenizersBackend", "PreTrainedTokenizerFast"))
    (options.folder / "heldout.txt").write_text(held_out, encoding="utf-8")
    calibration = "\n\n\n".join(documents)[:CALIBRATION_BYTES]
    (options.folder / "calibration.txt").write_text(calibration, encoding="utf-8")


def read_documents() -> tuple[list[str], str]:
    """Documents to train on, and the text held out."""
    names = sorted(topics)
    kept_out = names[3::8]
    held_out = "\n\n\n".join(topics[name].strip() for name in kept_out)
    secret = set(paragraphs("\n\n".join(topics[name] for name in kept_out)))
    documents = ["\n\n".join(p for p in paragraphs(topics[n]) if p not in secret) for n in names]
    documents += sorted(set(docstrings()))
    return [text for text in documents if text.strip()], held_out


def paragraphs(text: str) -> list[str]:
    return [part for part in text.strip().split("\n\n") if part.strip()]


def docstrings() -> Iterator[str]:
    """Those of more than a line, from the modules of the standard library."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            text = ast.get_docstring(node) if isinstance(node, documented) else None
            if text and "\n" in text:
                yield text


def train_tokenizer(documents: list[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE: any text has tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=END, eos_token=END)


def train(tokens: torch.Tensor, unseen: torch.Tensor, steps: int) -> LlamaForCausalLM:
    model = LlamaForCausalLM(LlamaConfig(**CONFIG))
    say(f"{sum(p.numel() for p in model.parameters()):,} parameters")
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.95), weight_decay=0.1)
    generator = torch.Generator().manual_seed(0)
    started = time.monotonic()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 4e-3 * rate(step, steps)
        starts = torch.randint(tokens.numel() - CONTEXT, (BATCH,), generator=generator)
        batch = torch.stack([tokens[s : s + CONTEXT] for s in starts.tolist()])
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0 or step == steps - 1:
            spent = time.monotonic() - started
            say(f"{step:4} {spent:4.0f} s: {loss.item():.3f}, {validation(model, unseen):.3f}")
    return model.eval()


def rate(step: int, steps: int) -> float:
    """Linear warm-up, then a cosine."""
    return min((step + 1) / 40, 0.5 * (1 + math.cos(math.pi * step / steps)) + 0.02)


@torch.no_grad()
def validation(model: LlamaForCausalLM, unseen: torch.Tensor) -> float:
    segments = unseen[: 8 * CONTEXT].view(8, CONTEXT)
    return float(model(input_ids=segments, labels=segments).loss)


if __name__ == "__main__":
    main()
