"""The engine's end of an agent, against an agent that the test plays itself."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from played_agent import PlayedAgent
from pool_master import wait_until

from mooncake_pool import wire
from mooncake_pool.client import Outcome, StoreSettings
from mooncake_pool.link import AgentLink, Lane
from mooncake_pool.staging import PAGE, StagingArea, slot_stride


@pytest.fixture
def agent() -> Iterator[PlayedAgent]:
    played = PlayedAgent()
    yield played
    played.close()


class Caller(threading.Thread):
    """One get of `count` blocks in its own thread."""

    def __init__(self, link: AgentLink, count: int = 2, seconds: float = 5.0) -> None:
        super().__init__()
        self.link, self.count, self.seconds = link, count, seconds
        self.reply: wire.Reply | None = None
        self.slots: list[int] = []
        self.start()

    def run(self) -> None:
        deadline = time.monotonic() + self.seconds
        with self.link.slots(Lane.READ, self.count, deadline) as held:
            self.slots = held.numbers
            keys = [bytes(16)] * len(held)
            self.reply = self.link.call(Lane.READ, lambda call: wire.Get(call, keys, held.numbers), deadline, held)


def free(link: AgentLink) -> int:
    return len(link._free[Lane.READ])


def answer(request: wire.ToAgent) -> wire.Reply:
    assert isinstance(request, wire.Get)
    return wire.Reply(request.call, [0] * len(request.keys), [100] * len(request.keys))


def test_a_call_and_its_answer(agent: PlayedAgent) -> None:
    caller = Caller(agent.link)
    request = agent.next()
    assert isinstance(request, wire.Get) and request.slots == caller.slots and free(agent.link) == 2
    agent.send(answer(request))
    caller.join()
    assert caller.reply == answer(request) and free(agent.link) == 4


def test_slots_of_a_late_call_stay_with_the_agent(agent: PlayedAgent) -> None:
    caller = Caller(agent.link, seconds=0.05)
    request = agent.next()
    caller.join()
    assert caller.reply is None and free(agent.link) == 2
    assert agent.link.overdue(Lane.READ) and not agent.link.overdue(Lane.WRITE) and agent.link.stuck_for() > 0
    others = Caller(agent.link, count=4)
    second = agent.next()
    assert isinstance(second, wire.Get) and set(second.slots).isdisjoint(caller.slots)
    agent.send(answer(request))
    assert not agent.link.overdue(Lane.READ) and agent.link.stuck_for() == 0
    agent.send(answer(second))
    others.join()
    assert free(agent.link) == 4


def test_without_slots_a_call_waits_for_one(agent: PlayedAgent) -> None:
    first = Caller(agent.link, count=4)
    request = agent.next()
    second = Caller(agent.link, count=4)
    third = Caller(agent.link, count=1, seconds=0.05)
    third.join()
    assert third.slots == [] and third.reply is None
    agent.send(answer(request))
    first.join()
    request = agent.next()
    while not (isinstance(request, wire.Get) and request.slots):
        request = agent.next()
    agent.send(answer(request))
    second.join()
    assert second.reply is not None and free(agent.link) == 4


def test_death_lets_everybody_go(agent: PlayedAgent) -> None:
    callers = [Caller(agent.link, count=4), Caller(agent.link, count=4)]
    agent.next()
    agent.sock.close()
    assert agent.link.pump() is False
    begun = time.monotonic()
    for caller in callers:
        caller.join()
    assert time.monotonic() - begun < 1.0 and all(caller.reply is None for caller in callers)
    late = Caller(agent.link)
    late.join()
    assert late.reply is None and late.slots == []


def test_written_off_calls_end_at_once(agent: PlayedAgent) -> None:
    caller = Caller(agent.link)
    request = agent.next()
    agent.link.write_off_calls()
    caller.join()
    assert caller.reply is None and agent.link.overdue(Lane.READ)
    agent.send(answer(request))
    assert not agent.link.overdue(Lane.READ) and free(agent.link) == 4


def test_an_agent_that_takes_nothing_in_is_given_up(agent: PlayedAgent) -> None:
    agent.link.sock.settimeout(0.05)
    agent.link.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    keys = [bytes(16)] * 20_000
    reply = agent.link.call(Lane.READ, lambda call: wire.Contains(call, keys), time.monotonic() + 5)
    assert reply is None and agent.link.pump() is False


def test_the_masters_absence_is_noticed_in_answers(agent: PlayedAgent) -> None:
    caller = Caller(agent.link, count=1)
    request = agent.next()
    assert isinstance(request, wire.Get)
    agent.send(wire.Reply(request.call, [Outcome.MASTER_GONE], [0]))
    caller.join()
    assert agent.link.master_answers is False
    agent.link.ask_state(0.0)
    agent.link.ask_state(0.0)  # one at a time
    assert isinstance(agent.next(), wire.State) and agent.link.silent_for() >= 0
    agent.send(wire.StateReply(0, True))
    assert agent.link.master_answers is True and agent.link.silent_for() == 0
    agent.link.ask_state(60.0)
    assert agent.link.silent_for() == 0  # too soon


def test_last_words_leave_the_vendors_chatter_out(agent: PlayedAgent) -> None:
    agent.link._log.write(b"WARNING: Logging before InitGoogleLogging() is written to STDERR\nit broke\n")
    agent.link._log.flush()
    assert agent.link.last_words() == "it broke"


# ---------------------------------------------------------------- frames and slots

messages = st.lists(
    st.one_of(
        st.builds(wire.Contains, st.integers(0, 9), st.lists(st.binary(max_size=20)), st.booleans()),
        st.builds(wire.Put, st.integers(0, 9), st.lists(st.binary(max_size=20)), st.lists(st.integers(0, 99))),
        st.just(wire.Close()),
    ),
    max_size=5,
)


@given(messages, st.integers(1, 50))
def test_frames_survive_any_cut(sent: list[wire.ToAgent], step: int) -> None:
    data = b"".join(wire.frame(message) for message in sent)
    reader = wire.FrameReader()
    received = [body for i in range(0, len(data), step) for body in reader.feed(data[i : i + step])]
    assert [wire.to_agent.decode(body) for body in received] == sent


def test_a_frame_without_end_is_refused() -> None:
    with pytest.raises(ValueError, match="frame of 4294967295 bytes"):
        list(wire.FrameReader().feed(b"\xff" * 8))


def test_slots_are_pages_of_one_memory() -> None:
    assert (slot_stride(1), slot_stride(PAGE), slot_stride(PAGE + 1)) == (PAGE, PAGE, 2 * PAGE)
    one = StagingArea.create(PAGE + 64, 3)
    other = StagingArea(one.fd, PAGE + 64, 3)
    one.value(1)[:] = b"\x01" * (PAGE + 64)
    assert bytes(other.value(1)) == b"\x01" * (PAGE + 64) and not any(other.value(0)) and not any(other.value(2))
    one.close_fd()
    one.close_fd()


# ---------------------------------------------------------------- the process on its own


def test_an_agent_ends_with_its_engine_even_before_it_began() -> None:
    ours, theirs = socket.socketpair()
    process = subprocess.Popen(
        [sys.executable, "-m", "mooncake_pool.agent", "--fd", str(theirs.fileno())], pass_fds=[theirs.fileno()]
    )
    theirs.close()
    ours.close()
    assert process.wait(20) == 0


def test_an_agent_that_cannot_have_a_store_says_why() -> None:
    ours, theirs = socket.socketpair()
    staging = StagingArea.create(100, 2)
    pipes = [theirs.fileno(), staging.fd]
    process = subprocess.Popen(
        [sys.executable, "-m", "mooncake_pool.agent", "--fd", str(theirs.fileno())],
        pass_fds=pipes,
        stderr=subprocess.DEVNULL,
    )
    theirs.close()
    with ours:
        store = StoreSettings("127.0.0.1:9", "127.0.0.1")
        request = wire.Open(store, "p", staging.fd, staging.slot_bytes, 100, 2, None, 0, "both", "m", "inc", 9004)
        ours.sendall(wire.frame(request))
        failed = wire.from_agent.decode(next(wire.receive_frames(ours)))
        assert isinstance(failed, wire.Failed) and "no master at 127.0.0.1:9" in failed.reason
        assert process.wait(20) == 1
    staging.close_fd()


def test_waiting_helper_names_what_it_waited_for() -> None:
    with pytest.raises(AssertionError, match=r"not within 0\.01 s: the end"):
        wait_until(lambda: False, 0.01, "the end")
