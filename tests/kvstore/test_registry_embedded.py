"""The private Valkey: starts on a port that is really its own, and never outlives its owner."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from registry_helpers import eventually, valkey_client

from kvstore.registry import embedded
from kvstore.registry.embedded import EmbeddedValkey, ValkeyFailed


def test_start_stop_start_on_the_same_port() -> None:
    server = EmbeddedValkey()
    server.start()
    port, pid = server.port, server.pid
    with valkey_client(server) as client:
        client.set("k", "v")
    server.stop()
    server.stop()
    assert not psutil.pid_exists(pid)
    server.start()
    assert server.port == port and server.pid != pid
    with valkey_client(server) as client:
        assert client.get("k") is None  # nothing is kept
    server.stop()


def test_an_unstarted_server_has_no_address() -> None:
    server = EmbeddedValkey()
    with pytest.raises(RuntimeError, match="not started"):
        _ = server.uri
    with pytest.raises(RuntimeError, match="not running"):
        _ = server.pid


def test_two_servers_at_once() -> None:
    with EmbeddedValkey() as one, EmbeddedValkey() as two:
        assert one.port != two.port
        with pytest.raises(RuntimeError, match="running already"):
            one.start()


def test_a_taken_fixed_port_is_an_error_with_the_servers_own_words() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        server = EmbeddedValkey(port=taken.getsockname()[1])
        with pytest.raises(ValkeyFailed, match="Address already in use"):
            server.start()
    assert not server.running


def test_a_port_lost_to_another_server_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other server answers too: only the process id tells them apart."""
    with EmbeddedValkey() as other:
        free = embedded._free_port
        offers = [other.port, other.port]
        monkeypatch.setattr(embedded, "_free_port", lambda: offers.pop() if offers else free())
        with EmbeddedValkey() as server:
            assert server.port != other.port
            with valkey_client(server) as client:
                assert client.info("server")["process_id"] == server.pid


def test_stop_is_bounded_for_a_paused_server() -> None:
    server = EmbeddedValkey()
    server.start()
    pid = server.pid
    os.kill(pid, signal.SIGSTOP)
    before = time.monotonic()
    server.stop(timeout=0.5)
    assert time.monotonic() - before < 2
    assert not psutil.pid_exists(pid)


def test_the_log_can_be_kept(tmp_path: Path) -> None:
    with EmbeddedValkey(log_file=tmp_path / "logs" / "valkey.log"):
        pass
    assert "Ready to accept connections" in (tmp_path / "logs" / "valkey.log").read_text()


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_it_dies_with_its_owner(end: signal.Signals) -> None:
    code = (
        "from kvstore.registry.embedded import EmbeddedValkey as E; import time\n"
        "s = E(); s.start(); print(s.pid, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        assert psutil.pid_exists(pid)
        owner.send_signal(end)
        owner.wait(5)
    eventually(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE, timeout=3)
