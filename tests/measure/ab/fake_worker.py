"""A worker that measures nothing: it says what behaviour.json in its tree tells it to.

us: of every turn. offsets: of ln(us), one a process of a tree in the order started. die_at,
hang_at, fail_at, babble_at: an operation; die_in: the one process that dies at it. dead: number of
the process that dies before a request. refuse: a message for every case. wrong: what is wrong, in
the first wrong_starts processes or in all; error: how much; wrong_cases: keys of cases that are
wrong. slow_s: of each turn. config, binary: what prepare tells. needed: bytes.
waits: for a request, as it tells. warms: a placement when it is used. learns: takes findings.
"""

import json
import math
import os
import sys
import time
from pathlib import Path

TREE = Path.cwd()
told = json.loads((TREE / "behaviour.json").read_text())
# In a sandbox the tree is read-only: its counts and log are then of one process.
NOTES = TREE if os.access(TREE, os.W_OK) else Path(os.environ["TMPDIR"])
starts = NOTES / "starts"
number = len(starts.read_text()) if starts.exists() else 0
starts.write_text("x" * (number + 1))
offsets = told.get("offsets", [0.0])
us = told.get("us", 100.0) * math.exp(offsets[number % len(offsets)])
if told.get("print"):
    sys.stderr.write("loading a library\n")
log = (NOTES / "log").open("a")
if told.get("dead") == number:
    sys.exit("ImportError: no module named gone")


def reply(message):
    name = message["do"]
    log.write(json.dumps(message) + "\n")
    log.flush()
    if name == told.get("die_at") and number == told.get("die_in", number):
        sys.stderr.write("Traceback\nImportError: no module named gone\n")
        os._exit(3)
    if name == told.get("hang_at"):
        time.sleep(600)
    if name == told.get("babble_at"):
        return None
    if name == told.get("fail_at"):
        return {"error": "RuntimeError: CUDA error: an illegal memory access", "refused": False}
    if name == "prepare" and told.get("refuse"):
        return {"error": told["refuse"], "refused": True}
    return {"reply": ANSWERS[name](message)}


def describe(_message):
    device = {"uuid": told.get("uuid", "CPU-1"), "sku": "CPU"}
    version = told.get("version", 1)
    return {
        "version": version,
        "judged": 5,
        "waits_for_request": told.get("waits", True),
        "warms_when_used": told.get("warms", False),
        "takes_findings": told.get("learns", False),
        "protocol": 1,
        "root": told.get("root", str(TREE)),
        "device": device,
        "kernels": told.get("kernels", ""),
    }


def prepare(message):
    config = message["config"]
    if config is None:
        config = message["favourite"] or told.get("config", {})
    wrong = told.get("wrong", "") if number < told.get("wrong_starts", math.inf) else ""
    if message["case"] in told.get("wrong_cases", ()):
        wrong = "off"
    error = told.get("error") if wrong else None
    return {
        "config": config,
        "binary": told.get("binary"),
        "wrong": wrong,
        "max_rel_error": error,
    }


def turn(_message):
    time.sleep(told.get("slow_s", 0.0))
    found = {"launches": 7, "device_mhz": 1500.0} if told.get("learns") else {}
    valid = told.get("valid", True)
    return {"samples_us": [us, us, us], "mhz": told.get("mhz"), "valid": valid, **found}


ANSWERS = {
    "describe": describe,
    "memory": lambda _: {"needed": told.get("needed", 1), "free": 100},
    "prepare": prepare,
    "place": lambda _: {"copies": 1, "shared": False},
    "turn": turn,
    "leave": lambda _: {"wrong": told.get("wrong_after", "")},
    "release": lambda _: {},
}

for line in sys.stdin:
    message = json.loads(line)
    answer = reply(message)
    if answer is None:
        sys.stdout.write("hello\n")
    else:
        sys.stdout.write(json.dumps({"id": message["id"], **answer}) + "\n")
    sys.stdout.flush()
