from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

from mooncake_pool import net


def listening() -> socket.socket:
    server = socket.socket()
    server.bind(("127.0.0.1", 0))
    server.listen()
    return server


def test_routed_address() -> None:
    assert net.routed_address("127.0.0.1") == "127.0.0.1"  # a pool of one host may stay on loopback
    assert net.is_local_address(net.routed_address())
    assert not net.is_local_address("192.0.2.77")


def test_a_listener_makes_a_port_busy() -> None:
    with listening() as server:
        port = server.getsockname()[1]
        assert not net.port_is_free(port)
    assert net.port_is_free(port)


def test_free_ports_differ() -> None:
    ports = net.free_ports(8)
    assert len(set(ports)) == 8 and all(0 < port < 65536 for port in ports)


def test_whose_listener_it_is() -> None:
    code = (
        "import socket; s = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen(); "
        "print(s.getsockname()[1], flush=True); input()"
    )
    pipe = subprocess.PIPE
    with (
        subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, process_group=0) as child,
        listening() as ours,
    ):
        assert child.stdout is not None
        port = int(child.stdout.readline())
        assert net.group_listens_on(child.pid, port)
        assert not net.group_listens_on(os.getpgrp(), port)
        assert not net.group_listens_on(child.pid, ours.getsockname()[1])
        child.communicate(b"\n")
    assert not net.group_listens_on(child.pid, port)


def hca(root: Path, name: str, state: str, rate: str) -> None:
    port = root / name / "ports" / "1"
    port.mkdir(parents=True)
    (port / "state").write_text(state)
    (port / "rate").write_text(rate)


def test_the_fastest_active_devices(tmp_path: Path) -> None:
    assert net.rdma_devices(tmp_path) == []
    hca(tmp_path, "mlx5_1", "4: ACTIVE\n", "400 Gb/sec (4X NDR)\n")
    hca(tmp_path, "mlx5_0", "4: ACTIVE\n", "400 Gb/sec (4X NDR)\n")
    hca(tmp_path, "mlx5_2", "4: ACTIVE\n", "100 Gb/sec (4X EDR)\n")
    hca(tmp_path, "mlx5_3", "1: DOWN\n", "800 Gb/sec\n")
    hca(tmp_path, "mlx5_4", "4: ACTIVE\n", "\n")
    assert net.rdma_devices(tmp_path) == ["mlx5_0", "mlx5_1"]
