"""The accuracy gate: quantized models are evaluated, and judged by the limits of a policy.

Each file of `checks/` is a check; `contract.py` says what a check has and gets. `policy.py` reads
the tables of checks from a policy. `power.py` plans how many segments are evaluated, by the planned
test of a text in `text_test.py`; `results.py` has the results that checks read, `judging.py`
compares a value with a limit; `gate.py` evaluates and runs the checks.
"""
