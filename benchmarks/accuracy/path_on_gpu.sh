#!/bin/sh
# Checks and times the serving path and parity on a GPU: results in $OUT, a table last.
set -u
PYTHON=${PYTHON:-python3}
OUT=${OUT:-.}
export PYTHONPATH="$PWD:${PYTHONPATH:-}" PYTHONUNBUFFERED=1
damage="$PYTHON benchmarks/accuracy/path_damage.py"
smol=/tmp/random-smollm2
$PYTHON - $smol <<'END'
import shutil, sys
import torch
from transformers import LlamaConfig, LlamaForCausalLM
torch.manual_seed(0)
sizes = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152}
config = LlamaConfig(**sizes, **heads, max_position_embeddings=2048, initializer_range=0.06, tie_word_embeddings=True)
LlamaForCausalLM(config).half().save_pretrained(sys.argv[1])
for file in ("tokenizer.json", "tokenizer_config.json", "heldout.txt"):
    shutil.copy(f"examples/models/tiny-llama/{file}", sys.argv[1])
END
run() { name=$1; shift; echo "== $name"; "$@" 2>&1 | tee "$OUT/$name.txt" | cut -c1-400; }
run clean timeout 150 $damage --only nothing --scheme flexq-w6ax,fp16,w8a16,w4a16,fp6,rtn-w8a8,w6a8,flexq-w6ax+kv8,flexq-w6ax+kv4 --tokens 256 --out "$OUT/clean.json"
run smol timeout 150 $damage --only nothing --model $smol --scheme flexq-w6ax,w8a16 --tokens 512 --new 64 --out "$OUT/smol.json"
run random-13b timeout 150 $damage --random llama-13b --scheme flexq-w6ax --out "$OUT/random-13b.json"
run damage timeout 170 $damage --scheme flexq-w6ax --batch 1,3,8 --tokens 256 --out "$OUT/damage.json"
run tests timeout 100 $PYTHON -m pytest -q -x -m gpu tests/gpu/test_decode.py
for name in clean smol random-13b damage tests; do echo "-- $name"; tail -n 14 "$OUT/$name.txt" | cut -c1-260; done
