"""Worker processes of ranks (kernels/runtime/ranks.py), which answer every request together."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from flexq_bench.measure.worker_process import RefusedError, WorkerProcess

_GRACE_S = 10.0  # for the answers of other ranks after one has failed: they may wait for it


class RankProcesses:
    """One process per device; a context manager that terminates them.

    command: of a process that takes --device, --rank, --ranks and --meeting besides. Other
    arguments as of WorkerProcess. is_broken: one of them died or was ended.
    """

    def __init__(
        self,
        name: str,
        tree: Path,
        command: Sequence[str],
        devices: Sequence[str],
        *,
        timeout_s: float,
    ) -> None:
        with ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="fqb-ranks-"))
            ends = ("--ranks", str(len(devices)), "--meeting", str(Path(folder) / "meeting"))
            self._processes = [
                stack.enter_context(
                    WorkerProcess(
                        name,
                        tree,
                        (*command, "--device", device, "--rank", str(rank), *ends),
                        timeout_s=timeout_s,
                    )
                )
                for rank, device in enumerate(devices)
            ]
            self._threads = stack.enter_context(ThreadPoolExecutor(len(devices)))
            self._resources = stack.pop_all()
        self.is_broken = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *details: Any) -> None:
        if kind is not None:  # also Ctrl-C: don't wait for the current request
            for process in self._processes:
                process.kill()
        for process in self._processes:
            process.finish()
        self._resources.__exit__(kind, *details)

    def close(self) -> None:
        """End the processes."""
        self.__exit__(None, None, None)

    def ask(self, what: str, **arguments: Any) -> list[dict[str, Any]]:
        """The replies of all ranks to one request.

        Raises what the first of them raises that fails; ranks that then wait for it are ended.
        """
        answers = [self._threads.submit(p.ask, what, **arguments) for p in self._processes]
        done, _ = wait(answers, return_when=FIRST_EXCEPTION)
        failed = next((a for a in answers if a in done and a.exception() is not None), None)
        if failed is not None:
            _, waiting = wait(answers, timeout=_GRACE_S)
            for process, answer in zip(self._processes, answers, strict=True):
                if answer in waiting:
                    process.kill()
            refused = all(isinstance(a.exception(), RefusedError) for a in answers)
            self.is_broken = self.is_broken or not refused
            failed.result()
        return [answer.result() for answer in answers]
