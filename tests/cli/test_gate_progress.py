"""Progress of `gate accuracy`: evaluated segments and the time left."""

from __future__ import annotations

import re
import time
from types import SimpleNamespace

from flexq_bench.cli import accuracy
from flexq_bench.cli.progress import progress


def test_progress_counts_segments_of_all_texts(capsys, monkeypatch):
    monkeypatch.setattr(accuracy, "shown_progress", lambda what: progress(what, interval_s=0.1))
    texts = [SimpleNamespace(name=name) for name in ("code", "maths")]
    evaluator = SimpleNamespace(on_block=None, on_segment=None, reference=None)
    setup = SimpleNamespace(
        evaluator=evaluator, plan=SimpleNamespace(schemes=("fp16", "w6a6"), texts=texts)
    )
    with accuracy.segment_progress(setup) as (on_unit, on_activity):
        for text in ("code", "maths"):
            evaluator.on_segment("fp16", text, 10, 10)
            on_unit(("fp16", text), [])
        for done in range(1, 5):
            evaluator.on_segment("w6a6", "code", done, 20)
        wait_for(capsys, r"segments of code under w6a6: 24 of 60 in \d s, about \d s left")
        on_unit(("w6a6", "code"), [])  # an early stop
        evaluator.on_segment("w6a6", "maths", 1, 10)
        wait_for(capsys, r"segments of maths under w6a6: 25 of 34 in \d s, about \d s left")
        on_activity("parity of kernels")
        wait_for(capsys, "parity of kernels: 25 of 34 in")


def wait_for(capsys, pattern):
    """Read lines until one matches; the test's timeout ends it otherwise."""
    shown = ""
    while not re.search(pattern, shown):
        time.sleep(0.05)
        shown += capsys.readouterr().err
