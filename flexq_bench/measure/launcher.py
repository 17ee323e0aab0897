"""How worker processes start: each with a new interpreter, or forked from a server."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Protocol


class Process(Protocol):
    """A started process, as `subprocess.Popen` describes it: the part that workers need.

    pid: as this process sees it; also the id of the process's own group and session.
    """

    @property
    def pid(self) -> int: ...

    @property
    def stdin(self) -> IO[bytes] | None: ...

    @property
    def stdout(self) -> IO[bytes] | None: ...

    @property
    def returncode(self) -> int | None: ...

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...


class Launcher(Protocol):
    """A way to start processes."""

    def start(
        self,
        command: Sequence[str],
        *,
        folder: Path,
        environment: Mapping[str, str],
        stderr: IO[bytes],
    ) -> Process:
        """Start a command in a session of its own, with pipes for stdin and stdout.

        folder: its working directory. environment: all of its variables. Raises OSError if it
        can't be started.
        """
        ...


class FreshProcesses:
    """Starts each process with a new interpreter."""

    def start(
        self,
        command: Sequence[str],
        *,
        folder: Path,
        environment: Mapping[str, str],
        stderr: IO[bytes],
    ) -> Process:
        return subprocess.Popen(
            list(command),
            cwd=folder,
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            start_new_session=True,  # Ctrl-C reaches only us: we end the process in good order
        )
