"""Folder of stories260K with the vocabulary of llama2.c as a tokenizer that transformers reads.

    python benchmarks/accuracy/stories260k.py SOURCE TEXT --out FOLDER

SOURCE has config.json, model.safetensors and tok512.bin (int32; of each token its float32 score,
int32 length and bytes). In TEXT, `<|endoftext|>` separates stories; FOLDER/stories.txt begins each
with the BOS token instead.
"""

from __future__ import annotations

import argparse
import shutil
import struct
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, processors
from transformers import PreTrainedTokenizerFast

SPACE, BYTES = "▁", 256
SPECIAL = ("<unk>", "<s>", "</s>")


def tokenizer_of(raw: bytes) -> Tokenizer:
    """Byte-pair encoding that merges the pair with the best score first, as llama2.c does."""
    words, scores, at = [], [], 4
    while at < len(raw):
        score, length = struct.unpack_from("<fi", raw, at)
        at += 8 + length
        words.append(raw[at - length : at].decode("utf-8", "replace").replace(" ", SPACE))
        scores.append(score)
    words[: len(SPECIAL)] = SPECIAL
    words[len(SPECIAL) : len(SPECIAL) + BYTES] = [f"<0x{byte:02X}>" for byte in range(BYTES)]
    ids = {word: index for index, word in enumerate(words)}
    pairs = [
        (-scores[index], (word[:cut], word[cut:]))
        for index, word in enumerate(words)
        if index >= len(SPECIAL) + BYTES
        for cut in range(1, len(word))
        if word[:cut] in ids and word[cut:] in ids
    ]
    merges = [pair for _, pair in sorted(pairs, key=lambda scored: scored[0])]
    unknown = SPECIAL[0]
    tokenizer = Tokenizer(models.BPE(ids, merges, unk_token=unknown, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    begin = SPECIAL[1]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A", special_tokens=[(begin, ids[begin])]
    )
    return tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.out.mkdir(exist_ok=True)
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(options.source / name, options.out / name)
    unknown, begin, end = SPECIAL
    tokenizer = tokenizer_of((options.source / "tok512.bin").read_bytes())
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token=unknown, bos_token=begin, eos_token=end
    ).save_pretrained(options.out)
    stories = options.text.read_text(encoding="utf-8").split("<|endoftext|>")
    text = begin.join(story.strip() for story in stories if story.strip())
    (options.out / "stories.txt").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
