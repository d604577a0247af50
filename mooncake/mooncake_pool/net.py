"""Addresses, ports and RDMA devices of this host."""

from __future__ import annotations

import os
import socket
from pathlib import Path

_UNROUTED = ("192.0.2.1", 9)  # TEST-NET: nothing is sent, the kernel only picks the source address


def routed_address(peer: str | None = None) -> str:
    """IPv4 address of this host that `peer` (default: the default route) reaches it by; 127.0.0.1 when alone."""
    target = (peer, 9) if peer else _UNROUTED
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            address = str(probe.getsockname()[0])
    except OSError:
        address = ""
    if address and (peer or not address.startswith("127.")):
        return address
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"


def is_local_address(host: str) -> bool:
    """True when `host` is an IPv4 address (or a name of one) of this machine."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((host, 0))
        except OSError:
            return False
    return True


def port_is_free(port: int) -> bool:
    """True when a TCP server could listen on `port` of all IPv4 addresses."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # TIME_WAIT is no listener
        try:
            probe.bind(("0.0.0.0", port))
            probe.listen(1)
        except OSError:
            return False
    return True


def free_ports(count: int) -> list[int]:
    """`count` different TCP ports that were free a moment ago; a caller retries when one is lost."""
    probes = [socket.socket(socket.AF_INET, socket.SOCK_STREAM) for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("0.0.0.0", 0))
        return [int(probe.getsockname()[1]) for probe in probes]
    finally:
        for probe in probes:
            probe.close()


def group_listens_on(pgid: int, port: int) -> bool:
    """True when a process of process group `pgid` holds the listening TCP socket of `port`."""
    inodes = _listening_inodes(port)
    return bool(inodes) and any(inodes & _socket_inodes(pid) for pid in _group_members(pgid))


def own_listening_ports() -> list[int]:
    """TCP ports on which this process listens."""
    inodes = _socket_inodes("self")
    return sorted(port for inode, port in _listening_sockets() if inode in inodes)


def _listening_inodes(port: int) -> set[str]:
    return {inode for inode, listening in _listening_sockets() if listening == port}


def _listening_sockets() -> set[tuple[str, int]]:
    """Inode and port of each TCP socket that listens in this network namespace."""
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            rows = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for row in rows:
            fields = row.split()
            if fields[3] == "0A":
                found.add((fields[9], int(fields[1].rpartition(":")[2], 16)))
    return found


def _group_members(pgid: int) -> list[str]:
    members = []
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        try:
            after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # ended meanwhile
        if int(after_name[2]) == pgid:
            members.append(pid)
    return members


def _socket_inodes(pid: str) -> set[str]:
    inodes: set[str] = set()
    folder = f"/proc/{pid}/fd"
    try:
        descriptors = os.listdir(folder)
    except OSError:
        return inodes
    for descriptor in descriptors:
        try:
            target = os.readlink(f"{folder}/{descriptor}")
        except OSError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    return inodes


def rdma_devices(root: Path = Path("/sys/class/infiniband")) -> list[str]:
    """Names of the fastest HCAs that have an active port, sorted; empty without RDMA."""
    rates: dict[str, float] = {}
    for port in root.glob("*/ports/*"):
        try:
            active = "ACTIVE" in (port / "state").read_text()
            rate = float((port / "rate").read_text().split()[0])
        except (OSError, ValueError, IndexError):
            continue
        if active:
            name = port.parent.parent.name
            rates[name] = max(rate, rates.get(name, 0.0))
    best = max(rates.values(), default=0.0)
    return sorted(name for name, rate in rates.items() if rate == best)
