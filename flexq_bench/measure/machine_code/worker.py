"""List and compile the builds of another revision, with that revision's own kernels.

Run as a script by its path, so that only the standard library and the packages of the revision are
imported: `worker.py FOLDER`, FOLDER the revision's checkout. Requests and replies have the form of
flexq_bench.measure.worker_messages, with three operations:

    list_labels. One reply, sooner than that of list_builds: {"labels": [...]} or {"error": ...}.
    list_builds, shapes: [[m, n, k], ...]. One reply: {"builds": [...]} or {"error": ...}.
    compile, out: FOLDER, work: [[index, target], ...]. A reply for each item, {"index", "target",
    "code": file name} or {"index", "target", "error"}; indices are those of the list.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from functools import partial
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any


def main(folder: str) -> None:
    # Output of a kernel's module must not get between the replies.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    builds: dict[Any, dict[str, list[str]]] = {}
    replies: Iterable[dict[str, Any]]
    for line in sys.stdin:
        request = json.loads(line)
        if request["do"] in ("list_labels", "list_builds"):
            try:
                registry = _registry(Path(folder))
                if request["do"] == "list_labels":
                    replies = [{"labels": list(registry.labels("cuda"))}]
                else:
                    builds = _builds(registry, request["shapes"])
                    replies = [{"builds": [_described(*item) for item in builds.items()]}]
            except Exception as error:
                text = " ".join(str(error).split())
                replies = [{"error": f"{type(error).__name__}: {text}"}]
        else:
            listed = list(builds)
            work = [(index, listed[index], target) for index, target in request["work"]]
            replies = _compiled(work, Path(request["out"]))
        for reply in replies:
            answers.write(json.dumps({"id": request["id"], "reply": reply}) + "\n")


def _module(name: str) -> Any:
    """A module of the revision, by its name within flexq_bench.

    Before version 2 the rooms were packages of their own.
    """
    has_links = Path(sys.argv[1], "flexq_bench", "kernels").is_dir()
    return import_module(f"flexq_bench.{name}" if has_links else name)


def _registry(folder: Path) -> Any:
    registry = _module("kernels.registry")
    if not Path(registry.__file__).is_relative_to(folder):
        raise ImportError(f"kernels was imported from {registry.__file__}, not from {folder}")
    return registry


def _builds(registry: Any, shapes: list[list[int]]) -> dict[Any, dict[str, list[str]]]:
    """Each build with the kernels that have it, and with those of which it is the default."""
    gemm_workload = _module("workloads.gemm").GemmWorkload
    builds: dict[Any, dict[str, list[str]]] = {}
    for label in registry.labels("cuda"):
        kernel = registry.resolve(label, "cuda")
        for build in kernel.builds():
            builds.setdefault(build, {"kernels": [], "default_of": []})["kernels"].append(label)
        # Of other operations no shapes are given; older revisions have none.
        spec = getattr(kernel, "spec", None)
        if not kernel.builds() or getattr(spec, "operation", "linear") != "linear":
            continue
        for build in _defaults(kernel, [gemm_workload(*sizes) for sizes in shapes]):
            owners = builds.setdefault(build, {"kernels": [], "default_of": []})
            owners["default_of"].append(label)
    return builds


def _defaults(kernel: Any, shapes: list[Any]) -> set[Any]:
    """The builds that run without tuning, on the GPU of any target."""
    try:
        gpu_module = _module("kernels.runtime.gpu")
        of_target, chosen_for = gpu_module.OF_TARGET, gpu_module.chosen_for
    except (ImportError, AttributeError):
        # Older revisions can't describe a GPU; without one, some of their kernels can't choose.
        with suppress(AssertionError, RuntimeError):
            return {build for gemm in shapes for build in kernel.builds_for(gemm, None)}
        return set()
    builds: set[Any] = set()
    for gpu in of_target.values():
        with chosen_for(gpu):
            builds.update(build for gemm in shapes for build in kernel.builds_for(gemm, None))
    return builds


def _described(build: Any, owners: dict[str, list[str]]) -> dict[str, Any]:
    block = getattr(build, "block", None)  # missing in older revisions
    return {
        "source": build.source,
        "defines": [list(define) for define in build.defines],
        "min_sm": build.min_sm,
        "only_sm": getattr(build, "only_sm", None),  # missing in older revisions
        "block": block and [block.function, block.threads, block.shared_bytes],
        **owners,
    }


def _compiled(work: list[tuple[int, Any, str]], out: Path) -> Iterator[dict[str, Any]]:
    compile_one = partial(_compile, out)
    # NVRTC compiles one source at a time in a process, with any number of threads.
    processes = min(os.cpu_count() or 1, len(work))
    if processes <= 1:
        yield from map(compile_one, work)
        return
    with ProcessPoolExecutor(processes, mp_context=get_context("fork")) as pool:
        yield from pool.map(compile_one, work)


def _compile(out: Path, item: tuple[int, Any, str]) -> dict[str, Any]:
    compile_build = _module("kernels.runtime.nvrtc").compile_build
    index, build, target = item
    answer: dict[str, Any] = {"index": index, "target": target}
    try:
        code = compile_build(build, target).code
    except Exception as error:
        return answer | {"error": " ".join(str(error).split()) or type(error).__name__}
    name = f"{index}-{target}.cubin"
    (out / name).write_bytes(code)
    return answer | {"code": name}


if __name__ == "__main__":
    main(*sys.argv[1:])
