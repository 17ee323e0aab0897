#!/bin/sh
# Checks and times the serving path and parity on a GPU: results in $OUT, a table last.
set -u
PYTHON=${PYTHON:-python3}
OUT=${OUT:-.}
export PYTHONPATH="$PWD:${PYTHONPATH:-}" PYTHONUNBUFFERED=1
damage="$PYTHON benchmarks/accuracy/path_damage.py"
smol=/tmp/random-smollm2
tiny=examples/models/tiny-llama
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
run() { name=$1; shift; echo "== $name"; date +%s; "$@" 2>&1 | tee "$OUT/$name.txt" | cut -c1-300; }
run smol timeout 120 $damage --only nothing --model $smol --scheme flexq-w6ax,flexq-w6ax --tokens 512 --out "$OUT/smol.json"
run damage timeout 110 $damage --scheme flexq-w6ax --batch 1,3,8 --tokens 256 --out "$OUT/damage.json"
run clean timeout 60 $damage --only nothing --scheme rtn-w8a8,w6a8,flexq-w6ax+kv8,flexq-w6ax+kv4 --tokens 256 --out "$OUT/clean.json"
run gate timeout 80 sh -c "time $PYTHON -m flexq_bench.cli gate accuracy --model $tiny --policy $tiny/policy.toml --data heldout=$tiny/heldout.txt --db $OUT/gate.sqlite --json $OUT/gate.json"
run tests timeout 110 $PYTHON -m pytest -q -m gpu tests/gpu/test_serving_path.py tests/gpu/test_decode.py
rm -f "$OUT/gate.sqlite"
for name in smol damage clean gate tests; do echo "-- $name"; tail -n 24 "$OUT/$name.txt" | cut -c1-300; done
