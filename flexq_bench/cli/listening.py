"""The address that a server listens on."""

from __future__ import annotations

import socket
from typing import Annotated

import typer

from flexq_bench.errors import UsageError

AddressOption = Annotated[
    str,
    typer.Option(
        "--address", "--host", help="Address to listen on; 0.0.0.0 makes it public in the network."
    ),
]
AllowHostOption = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-host",
        metavar="NAME",
        help="A further name under which browsers may ask for it, such as a proxy's; repeatable.",
    ),
]


def server_url(address: str, port: int) -> str:
    """Return the URL of a server. Raises UsageError if it can't listen on the address and port."""
    if not address.strip():
        raise UsageError(
            "--address is empty, which would listen on every network: name one, or leave it out "
            "for 127.0.0.1"
        )
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError as error:
            raise UsageError(
                f"can't listen on {address}:{port} ({error.strerror or error}): give another "
                "--port or --address"
            ) from None
    return f"http://{'localhost' if address == '0.0.0.0' else address}:{port}"
