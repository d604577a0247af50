"""The listening socket of a server, and the addresses by which others reach it."""

from __future__ import annotations

import ipaddress
import os
import socket
import tempfile
from pathlib import Path

from kvstore.protocol import join_address


class CannotBind(Exception):
    """The address cannot be listened on; the message says which and why."""


def bind(host: str, port: int) -> socket.socket:
    """A bound socket, not listening yet. Port 0 is one that the kernel picks. IPv4 goes before IPv6."""
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise CannotBind(f"--host {host!r}: {error.strerror or error}") from None
    family, kind, protocol, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise CannotBind(f"--host {host!r} --port {port}: {error.strerror or error}") from None
    return sock


def bound_port(sock: socket.socket) -> int:
    port: int = sock.getsockname()[1]
    return port


def reachable_host(sock: socket.socket) -> str:
    """The bound address; for a wildcard, the address of this host that its default route uses."""
    host: str = sock.getsockname()[0]
    return routed_address() if is_wildcard(host) else host


def is_wildcard(host: str) -> bool:
    try:
        return not host or ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def routed_address() -> str:
    """This host's IPv4 address towards others; nothing is sent. 127.0.0.1 without a route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return "127.0.0.1"
        address: str = probe.getsockname()[0]
        return address


def write_report(path: str, host: str, port: int) -> None:
    """`host:port` and a newline, all at once: a reader sees nothing or everything. A wildcard is this host's name."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    name = socket.gethostname() if is_wildcard(host) else host
    with tempfile.NamedTemporaryFile("w", dir=target.parent, prefix=target.name, delete=False) as file:
        file.write(join_address(name, port) + "\n")
    os.replace(file.name, target)
