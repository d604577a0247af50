"""The listening socket and the addresses that are told to others."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from trtllm_serve.binding import CannotBind, bind, bound_port, is_wildcard, reachable_host, write_report


def test_port_zero_is_a_real_port() -> None:
    with bind("127.0.0.1", 0) as sock:
        assert bound_port(sock) > 0
        assert reachable_host(sock) == "127.0.0.1"


def test_localhost_is_ipv4_where_there_is_one() -> None:
    with bind("localhost", 0) as sock:
        assert sock.family == socket.AF_INET


def test_a_wildcard_is_reached_by_an_address() -> None:
    with bind("0.0.0.0", 0) as sock:
        assert not is_wildcard(reachable_host(sock))


def test_a_port_in_use_is_said() -> None:
    with bind("127.0.0.1", 0) as sock:
        sock.listen()
        with pytest.raises(CannotBind, match=str(bound_port(sock))):
            bind("127.0.0.1", bound_port(sock))


def test_a_host_that_is_not_ours() -> None:
    with pytest.raises(CannotBind, match="no-such-host"):
        bind("no-such-host.invalid", 0)


@pytest.mark.parametrize(
    ("host", "line"),
    [
        ("127.0.0.1", "127.0.0.1:80\n"),
        ("::1", "[::1]:80\n"),
        ("0.0.0.0", f"{socket.gethostname()}:80\n"),
        ("::", f"{socket.gethostname()}:80\n"),
    ],
)
def test_report(tmp_path: Path, host: str, line: str) -> None:
    path = tmp_path / "new" / "address"
    write_report(str(path), host, 80)
    assert path.read_text() == line
    assert [file.name for file in path.parent.iterdir()] == ["address"]
