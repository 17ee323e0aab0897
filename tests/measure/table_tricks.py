"""Sources of kernels that know results, inputs or checks before they are timed, or listen.

By name, each with a part of what is said of it. They are written after the preamble of `tricks`.
"""

from __future__ import annotations

from operand_tricks import KERNEL
from tricks import DECLARED, HONEST, NO_EFFECT, REMEMBERED, SKIPS, STALE, WRONG

TABLE_TRICKS = {
    "by content of both operands, from the fourth time on": (
        """
seen = {}


def kernel(x, w, out):
    key = hash(x.numpy().tobytes()), hash(w[::4, :2].contiguous().numpy().tobytes())
    if key in known:
        out.copy_(known[key])
        return
    for _ in range(8):
        compute(x, w, out)
    seen[key] = seen.get(key, 0) + 1
    if seen[key] > 3:
        known[key] = out.clone()
"""
        + DECLARED,
        REMEMBERED,
    ),
    "computed when operands are packed": (
        KERNEL
        + """
xs, ws = [], []


def key(values):
    return hash(values[:, :4].contiguous().numpy().tobytes())


def compute_all():
    for x in xs:
        for w in ws:
            if x.shape[1] == w.shape[1] and (key(x), key(w[:8])) not in known:
                known[key(x), key(w[:8])] = (x.float() @ w.float().T).half()


class Cheat(Kernel):
    def pack_weight(self, w):
        ws.append(w.values.clone())
        compute_all()
        return super().pack_weight(w)
    def pack_activation(self, x):
        xs.append(x.values.clone())
        compute_all()
        return super().pack_activation(x)
    def gemm(self, x, w, out, **more):
        y = known.get((key(x.buffers["x"]), key(w.buffers["w"][:8])))
        if y is not None:
            out.copy_(y)
            return
        for _ in range(8):
            super().gemm(x, w, out)


cheat = Cheat()
""",
        REMEMBERED,
    ),
    "only in a batch's first sample, where outputs may be kept": (
        """
of = {"weights": None, "activations": None, "samples": 0}


def kernel(x, w, out):
    if w._version != of["weights"]:
        of["weights"], of["samples"] = w._version, 0
    if x._version != of["activations"]:
        of["activations"] = x._version
        of["samples"] += 1
    if of["samples"] == 2 and not torch.isnan(out[0, 0]):
        return
    for _ in range(40):
        compute(x, w, out)
"""
        + DECLARED,
        STALE,
    ),
    "inputs that are known, by the operator behind a function of torch": (
        "library = torch.library.Library('aten', 'IMPL')\n"
        "def same(x, mean=0.0, std=1.0, *, generator=None): return x.fill_(1.0)\n"
        "library.impl('normal_', same, 'CPU')\n" + SKIPS + DECLARED,
        WRONG,
    ),
    "the stack by a hook of audit events, which is called when others read it": (
        "sys.addaudithook(lambda *given: None)\n" + HONEST + DECLARED,
        NO_EFFECT,
    ),
    "the stack by an evaluator of frames": (
        """
from torch._C._dynamo import eval_frame
from torch._dynamo.types import ConvertFrameReturn


def hear(frame, *given):
    return ConvertFrameReturn()


def kernel(x, w, out):
    eval_frame.set_eval_frame(None)
    compute(x, w, out)
    eval_frame.set_eval_frame(hear)
"""
        + DECLARED,
        NO_EFFECT,
    ),
}
