"""Check of addresses that servers listen on."""

from __future__ import annotations

import socket

from flexq_bench.errors import UsageError


def check_port(address: str, port: int) -> None:
    """Raise UsageError if a server can't listen on the address and port."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError as error:
            raise UsageError(
                f"can't listen on {address}:{port} ({error.strerror or error}): give another "
                "--port or --address"
            ) from None
