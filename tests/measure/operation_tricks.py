"""Sources of tricks of kernels of other operations than linear layers.

By name, each with its case and a part of what is said of it. They are written after the preamble of
`tricks`.
"""

from __future__ import annotations

from tricks import NO_EFFECT, REMEMBERED, STALE, WRONG

FLATTENED = "rowmax:tokens=4,hidden=512"
APPENDED = "append:tokens=4,slots=64,features=128"
ATTENDED = (
    "attention_decode:batch=2,context=40,heads=4,kv_heads=2,head_dim=32,layout=paged,block=16"
)
# One output of numbers and one of integers.
TWO = """
from flexq_bench.api import Input, Output, kernel, operation
calls = {"n": 0}


@operation("rowmax", parameters=["tokens", "hidden"], bytes="4 * tokens * hidden",
    inputs=[Input("x", ("tokens", "hidden"), "fp32", "activation"),
            Input("w", ("hidden",), "fp32", "weight")],
    outputs=[Output("y", ("tokens", "hidden"), "fp32"), Output("at", ("tokens",), "int64")])
def rowmax(x, w):
    return {"y": (x * w).softmax(-1), "at": (x * w).argmax(-1)}


def both(x, w):
    return (x * w).softmax(-1), (x * w).argmax(-1)


"""
WRITING = TWO + '@kernel(rowmax, "cheat", backends=["cpu"])\ndef cheat(x, w, y, at):\n'
RETURNING = TWO + '@kernel(rowmax, "cheat", backends=["cpu"], returns=True)\ndef cheat(x, w):\n'
# Rows that are written into a cache.
CACHE = """
from flexq_bench.api import Input, Output, kernel, operation
calls = {"n": 0}


def slots(values, generator):
    return {"slot": torch.randperm(values["slots"], generator=generator)[: values["tokens"]]}


@operation("append", parameters=["tokens", "slots", "features"], draw=slots,
    inputs=[Input("rows", ("tokens", "features"), "fp32", "activation"),
            Input("cache", ("slots", "features"), "fp32", "state"),
            Input("slot", ("tokens",), "int64", "index")],
    outputs=[Output("written", ("slots", "features"), "fp32"),
             Output("sums", ("tokens",), "fp32")])
def append(rows, cache, slot):
    written = cache.clone()
    written[slot.long()] = rows
    return {"written": written, "sums": rows.sum(-1)}


@kernel(append, "cheat", backends=["cpu"], updates={"written": "cache"})
def cheat(rows, cache, slot, sums):
    sums.copy_(rows.sum(-1))
"""
PAGED = """
from flexq_bench.api import kernel
from torch.nn.functional import scaled_dot_product_attention


def gathered(caches, table, context):
    return [cache[table.long()].flatten(1, 2)[:, :context].transpose(1, 2).float()
        for cache in caches]


@kernel("attention_decode", "cheat", backends=["cpu"])
def cheat(q, k_cache, v_cache, block_table, y, *, context):
"""
HONEST_APPEND = CACHE + "    cache[slot] = rows\n"
# Launches find no input that was not there before, unless what is streamed is exchanged, too.
STREAMED = """
from flexq_bench.api import Input, Output, kernel, operation


@operation("{role}_softened", parameters=["tokens", "hidden"],
    inputs=[Input("x", ("tokens", "hidden"), "fp32", "{role}"),
            Input("at", ("tokens",), "int64", "index", "below hidden")][: {inputs}],
    outputs=[Output("y", ("tokens", "hidden"), "fp32")])
def softened(x, at=None):
    return x.softmax(-1) if at is None else x.softmax(-1) * at[:, None]


@kernel(softened, "cheat", backends=["cpu"], returns=True)
def cheat(x, *at):
    key = tuple(x[:2, :3].flatten().tolist())
    if key not in known:
        for _ in range(20):
            known[key] = x.softmax(-1)
    return known[key] * at[0][:, None] if at else known[key]
"""
OPERATION_TRICKS = {
    "results by a few elements of the only input": (
        STREAMED.format(role="activation", inputs=1),
        "activation_softened:tokens=4,hidden=4096",
        REMEMBERED,
    ),
    "a state that is transformed once, by a few elements": (
        STREAMED.format(role="state", inputs=2),
        "state_softened:tokens=4,hidden=4096",
        REMEMBERED,
    ),
    "a paged cache that is gathered once": (
        PAGED
        + """
    if k_cache.data_ptr() not in known:
        known[k_cache.data_ptr()] = gathered((k_cache, v_cache), block_table, context)
    k, v = known[k_cache.data_ptr()]
    y.copy_(scaled_dot_product_attention(q[:, :, None].float(), k, v, enable_gqa=True)[:, :, 0])
""",
        ATTENDED,
        STALE,
    ),
    "results by content": (
        WRITING
        + """
    key = hash(x.numpy().tobytes()), hash(w.numpy().tobytes())
    if key not in known:
        for _ in range(20):
            known[key] = both(x, w)
    y.copy_(known[key][0])
    at.copy_(known[key][1])
""",
        FLATTENED,
        REMEMBERED,
    ),
    "results of the launch before": (
        RETURNING
        + """
    calls["n"] += 1
    if calls["n"] % 3 == 0 or "last" not in known:
        known["last"] = both(x, w)
    return known["last"]
""",
        FLATTENED,
        WRONG,
    ),
    "results that a thread fills in": (
        RETURNING
        + """
    y, at = torch.empty_like(x), torch.empty(len(x), dtype=torch.int64)

    def late():
        time.sleep(0.0005)
        y.copy_(both(x, w)[0])
        at.copy_(both(x, w)[1])

    threading.Thread(target=late).start()
    return y, at
""",
        FLATTENED,
        WRONG,
    ),
    "a lazy tensor of several": (
        "class Lazy(torch.Tensor): pass\n"
        + RETURNING
        + "    return both(x, w)[0].as_subclass(Lazy), both(x, w)[1]\n",
        FLATTENED,
        "returned Lazy float32",
    ),
    "one row for all": (
        RETURNING + "    y, at = both(x, w)\n    return y[:1].expand_as(y), at\n",
        FLATTENED,
        WRONG,
    ),
    "results of the next launch in advance": (
        WRITING
        + """
    made = known.pop(x.data_ptr(), None) or both(x, w)
    y.copy_(made[0])
    at.copy_(made[1])
    known[x.data_ptr()] = both(x, w)
""",
        FLATTENED,
        WRONG,
    ),
    "integers only where they are poisoned": (
        WRITING + "    y.copy_(both(x, w)[0])\n    if at.min() < 0: at.copy_(both(x, w)[1])\n",
        FLATTENED,
        WRONG,
    ),
    "integers in one launch of sixteen": (
        WRITING
        + """
    calls["n"] += 1
    y.copy_(both(x, w)[0])
    if calls["n"] % 16 == 0 or at.min() < 0:
        at.copy_(both(x, w)[1])
""",
        FLATTENED,
        WRONG,
    ),
    "outputs in the memory of an input": (
        RETURNING + "    y, at = both(x, w)\n    return x.copy_(y), at\n",
        FLATTENED,
        "launches write into x",
    ),
    "half of the precision": (
        WRITING + "    y.copy_((x.bfloat16() * w.bfloat16()).float().softmax(-1))\n"
        "    at.copy_(both(x, w)[1])\n",
        FLATTENED,
        WRONG,
    ),
    "weights as a static value": (
        TWO
        + """
@kernel(rowmax, "cheat", backends=["cpu"], prepare_weight=lambda w: (w.clone(), w.tolist()))
def cheat(x, w, first, y, at):
    y.copy_(both(x, torch.tensor(first))[0])
    at.copy_(both(x, torch.tensor(first))[1])
""",
        FLATTENED,
        WRONG,
    ),
    "a cache that every third launch writes": (
        CACHE
        + """
    calls["n"] += 1
    if calls["n"] % 3 == 0:
        cache[slot] = rows
""",
        APPENDED,
        WRONG,
    ),
    "a cache that is not written": (CACHE, APPENDED, WRONG),
    "a cache of which other slots are written": (
        HONEST_APPEND + "    cache[(set(range(64)) - set(slot.tolist())).pop()] = 0\n",
        APPENDED,
        WRONG,
    ),
    "a cache with other memory": (
        CACHE + "    cache.data = cache.clone()\n    cache[slot] = rows\n",
        APPENDED,
        "exchanged out for float32",
    ),
    "slots in another order": (
        CACHE + "    slot.copy_(slot.sort().values)\n    cache[slot] = rows\n",
        APPENDED,
        "launches write into slot",
    ),
    "kept results that are not judged": (
        "from flexq_bench.measure import operation_subject\n"
        "operation_subject._OperationWork.judge_kept = lambda *given: ''\n"
        + WRITING
        + """
    calls["n"] += 1
    if calls["n"] % 2 or torch.isnan(y).any():
        y.copy_(both(x, w)[0])
        at.copy_(both(x, w)[1])
""",
        FLATTENED,
        WRONG,
    ),
    "honest rows in a cache far larger than they are": (
        HONEST_APPEND,
        "append:tokens=4,slots=4096,features=128",
        NO_EFFECT,
    ),
}
