"""kill -9 of each part under load: OpenAI errors within 5 s, never a wrong text, nothing held, service comes back."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster_pair import pool_settings
from cluster_rig import Cluster, Load, Part, Reply, baseline, complete, eventually

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

ERROR_WITHIN_S = 5.0
OUTAGE_S = 3.0


def bodies() -> list[dict[str, Any]]:
    made = []
    for number in range(12):
        text = "Repeat: " + " ".join(["apple", "river", "stone", "house", "tree"][number % 5 :] * (2 + number % 3))
        prompt = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
        made.append({"model": "tiny", "prompt": prompt, "max_tokens": 40, "temperature": 0, "stream": number % 2 == 0})
    return made


class KillCluster:
    """Two hand-off paths at once (shared memory, then the pool), so that every part matters."""

    def __init__(self, directory: Path) -> None:
        self.cluster = cluster = Cluster(directory)
        cluster.start_registry()
        self.master = cluster.start_master()
        settings = pool_settings(directory) | {"cache_transceiver_config": {"backend": "DEFAULT"}}
        self.context = cluster.worker("context", "CONTEXT", settings)
        self.generation = cluster.worker("generation", "GENERATION", settings)
        self.router = cluster.router()
        cluster.start_all(self.context, self.generation, self.router)
        self.bodies = bodies()
        self.expected = [complete(self.router.url, body).text for body in self.bodies]
        assert all(self.expected)

    def judge(self, load: Load, killed_at: float) -> list[Reply]:
        """Every reply is either the right text or an OpenAI error in time; returns the failed ones."""
        failed = []
        for start, seconds, body, reply in load.replies:
            if reply.status == 200 and reply.error is None:
                assert reply.done, (body, reply)
                assert reply.text == self.expected[self.bodies.index(body)], (body, reply)
                continue
            failed.append(reply)
            assert reply.error is not None and set(reply.error) >= {"message", "type", "param", "code"}, reply
            assert reply.finish_reason is None, reply
            assert start + seconds - max(start, killed_at) < ERROR_WITHIN_S, (seconds, reply)
        return failed

    def serves(self) -> bool:
        return all(
            complete(self.router.url, body).text == want for body, want in zip(self.bodies, self.expected, strict=True)
        )


@pytest.fixture(scope="module")
def killable(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KillCluster]:
    rig = KillCluster(tmp_path_factory.mktemp("kill"))
    with rig.cluster:
        yield rig


def kill_and_return(rig: KillCluster, kill: Callable[[], None], restart: Callable[[], object]) -> list[Reply]:
    """Load for a while, kill, load on during the outage, restart, until it serves; returns the failed replies."""
    with Load(rig.router.url, rig.bodies, clients=4) as load:
        eventually(lambda: len(load.replies) >= 8, 30, "traffic flows")
        killed_at = time.monotonic()
        kill()
        count = len(load.replies)
        eventually(lambda: time.monotonic() - killed_at > OUTAGE_S and len(load.replies) > count, 20, "answers go on")
        restart()
        eventually(lambda: recent_success(load), 30, "the cluster serves again")
    failed = rig.judge(load, killed_at)
    assert rig.serves()
    baseline(rig.context, rig.generation, limit_s=8)
    return failed


def recent_success(load: Load) -> bool:
    return all(reply.status == 200 and reply.error is None for *_, reply in load.replies[-8:])


def restart(part: Part) -> Callable[[], object]:
    return lambda: part.start()


def test_generation_worker(killable: KillCluster) -> None:
    failed = kill_and_return(killable, killable.generation.kill, restart(killable.generation))
    assert failed, "requests were in flight"


def test_context_worker(killable: KillCluster) -> None:
    kill_and_return(killable, killable.context.kill, restart(killable.context))


def test_valkey(killable: KillCluster) -> None:
    """Serving goes on with the last view, so nothing fails at all."""
    registry = killable.cluster.registry
    assert registry is not None
    assert registry.pid is not None
    port = registry.port

    def again() -> None:
        registry.stop()
        killable.cluster.start_registry(port)

    assert not kill_and_return(killable, lambda: os.kill(registry.pid, signal.SIGKILL), again)
    assert complete(killable.router.url, killable.bodies[0]).text == killable.expected[0]


def test_master(killable: KillCluster) -> None:
    """The pool is only a cache: nothing fails."""

    def again() -> None:
        killable.cluster.start_master(rpc_port=port)

    port = killable.cluster.master_port()
    assert not kill_and_return(killable, killable.master.kill, again)
