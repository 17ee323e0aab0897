"""The accuracy gate: quantized models are evaluated, and judged by the limits of a policy.

To add a check, add its limit to `policy.py` and a `judge_...` function to `checks.py`, called from
`judge_distribution_limits` there if it judges results of a text, else from `_Gate._judged` in
`gate.py`. `power.py` plans how many segments are evaluated and shares the error probability among
the checks; `results.py` has the results that checks read; `gate.py` evaluates and reports.
"""
