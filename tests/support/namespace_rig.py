"""Workers with network addresses of their own: one network namespace each, joined by a bridge. Needs root."""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
from collections.abc import Iterator
from typing import Any

from cluster_rig import Cluster, Part


def why_not() -> str | None:
    """None if namespaces can be made here."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    name = f"probe-{secrets.token_hex(3)}"
    try:
        made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    except FileNotFoundError:
        return "iproute2 is not installed"
    if made.returncode != 0:
        return f"ip netns add: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name], check=True)
    return None


def ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"


class Namespaces:
    """`count` hosts 10.213.S.1 .. on one bridge; the test itself is 10.213.S.254."""

    def __init__(self, count: int) -> None:
        self._id = secrets.token_hex(2)
        self._net = f"10.213.{secrets.randbelow(250)}"
        self._count = count
        self._bridge = f"br{self._id}"

    def __enter__(self) -> Namespaces:
        try:
            ip("link", "add", self._bridge, "type", "bridge")
            ip("addr", "add", f"{self._net}.254/24", "dev", self._bridge)
            ip("link", "set", self._bridge, "up")
            for host in range(self._count):
                self._add(host)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        for host in range(self._count):
            with contextlib.suppress(AssertionError):
                ip("netns", "del", self.name(host))
        with contextlib.suppress(AssertionError):
            ip("link", "del", self._bridge)

    def name(self, host: int) -> str:
        return f"kv{self._id}-{host}"

    def link(self, host: int) -> str:
        return f"v{self._id}{host}"

    def address(self, host: int) -> str:
        return f"{self._net}.{host + 1}"

    def _add(self, host: int) -> None:
        name, link = self.name(host), self.link(host)
        ip("netns", "add", name)
        ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", name)
        ip("link", "set", link, "master", self._bridge, "up")
        ip("-n", name, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
        ip("-n", name, "link", "set", "eth0", "up")
        ip("-n", name, "link", "set", "lo", "up")

    def slow_down(self, host: int, megabits: float) -> None:
        """What the host sends."""
        rate = ["rate", f"{megabits}mbit", "burst", "16kb", "latency", "500ms"]
        command = ["tc", "-n", self.name(host), "qdisc", "replace", "dev", "eth0", "root", "tbf", *rate]
        subprocess.run(command, check=True, capture_output=True)

    def full_speed(self, host: int) -> None:
        subprocess.run(["tc", "-n", self.name(host), "qdisc", "del", "dev", "eth0", "root"], check=True)

    @contextlib.contextmanager
    def cut(self, host: int) -> Iterator[None]:
        """The host's cable is out."""
        ip("link", "set", self.link(host), "down")
        try:
            yield
        finally:
            ip("link", "set", self.link(host), "up")

    def worker(self, cluster: Cluster, host: int, settings: dict[str, Any], env: dict[str, str]) -> Part:
        """Not started. It serves every part of a request, and is not registered."""
        part = cluster.worker(f"worker{host}", None, settings)
        argv = [self.address(host) if word == "127.0.0.1" else word for word in part.argv]
        part.argv = ["ip", "netns", "exec", self.name(host), *argv]
        part.env = part.env | env
        return part
