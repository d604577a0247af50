"""Reads over NIXL (UCX): shared memory or CMA within a host, TCP or RDMA between hosts.

No progress thread of NIXL's: it polls without a pause and costs a core. Instead, one thread here drives the agent a few
thousand times a second while somebody may come to read, and twice a second else.

A read that was posted cannot be taken back: releasing its handle, and even dropping the peer, leaves the bytes on their
way (seen over TCP with a peer that was paused and went on). So a read that is given up is watched until NIXL reports
its end, and the pages that it writes to stay out of use until then.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import importlib.util
import logging
import mmap
import os
import queue
import socket
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

from kvstore.errors import TransferError
from kvstore.handoff import Handle, RemoteMemory
from kvstore.transceivers.base import OverCheck, Pages, Unsettled
from kvstore.transceivers.remote import MAX_BLOCKS, SCRATCH_SIZE, Piece, Verification, block_pieces, layout_of

log = logging.getLogger(__name__)

_IDLE_POLL = 0.5  # and while nobody is expected
_SPIN = 0.00005  # seconds between two looks at one's own read
_PEERS = 16  # connections kept
_SIOCGIFADDR = 0x8915


def available() -> str | None:
    """None, or why there is no NIXL here."""
    if importlib.util.find_spec("nixl") is None:
        return "the nixl package is not installed (extra cpu, cu12 or cu13)"
    return None


class NixlTransceiver:
    """One agent over the whole pool of this worker. `fetch` may be called from several threads."""

    name = "nixl"
    batch = MAX_BLOCKS

    def __init__(self, pages: Pages, incarnation: str, host: str = "", poll_interval: float = 0.0003) -> None:
        """`host`: the address that other workers know this one by; its interface carries the bytes. `poll_interval`:
        seconds between two drives of the agent while others may read from here. TransferError when NIXL cannot be had.
        """
        set_environment(host)
        self._poll_interval = poll_interval
        self._pages = pages
        self._incarnation = incarnation
        self._lock = threading.Lock()  # NIXL's Python agent is used by one thread at a time
        self._peers: OrderedDict[str, str] = OrderedDict()  # incarnation: agent name
        self._lingering: list[tuple[Any, Unsettled]] = []
        self._scratch: queue.SimpleQueue[_Scratch] = queue.SimpleQueue()
        self._awake = threading.Event()
        self._holding = False
        self._closed = False
        try:
            api = importlib.import_module("nixl._api")
            config = api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
            self._agent: Any = api.nixl_agent(incarnation, config)
            self._register(pages.address, pages.size)
            metadata: bytes = self._agent.get_agent_metadata()
        except Exception as error:  # the vendor's errors have no common base
            raise TransferError(f"NIXL does not start: {type(error).__name__}: {error}") from error
        self._descriptor = RemoteMemory(incarnation, pages.address, pages.num_blocks, pages.block_bytes, metadata)
        self._thread = threading.Thread(target=self._drive, name="nixl", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"NixlTransceiver({self._incarnation}, {len(self._peers)} peers, {len(self._lingering)} unsettled)"

    @property
    def unsettled(self) -> int:
        """Reads given up whose bytes may still come."""
        return len(self._lingering)

    def descriptor(self) -> RemoteMemory:
        return self._descriptor

    def reaches(self, handle: Handle) -> bool:
        return self.name in handle.remotes and handle.incarnation != self._incarnation

    def holding(self, open_offers: bool) -> None:
        self._holding = open_offers
        if open_offers:
            self._awake.set()

    def close(self) -> None:
        self._closed = True
        self._awake.set()
        self._thread.join(2.0)

    # ------------------------------------------------------------ reading

    def fetch(
        self, handle: Handle, ids: Sequence[int], generations: Sequence[int], blocks: Sequence[int], over: OverCheck
    ) -> None:
        remote = handle.remotes[self.name]
        layout = layout_of(remote, self._pages)
        peer = self._connect(handle.incarnation, remote)
        try:
            for start in range(0, len(ids), MAX_BLOCKS):
                part = slice(start, start + MAX_BLOCKS)
                wanted = ids[part]
                pieces = block_pieces(layout, wanted, self._pages, blocks[part])
                self._read(peer, self._pages.address, remote.base, pieces, over)
                check = Verification(wanted)
                with self._borrowed_scratch() as scratch:
                    self._read(peer, scratch.address, remote.base, check.pieces, over)
                    check.check(scratch.view, handle.incarnation, layout, wanted, generations[part])
        except _PeerLost as error:
            self._drop(handle.incarnation)
            raise TransferError(str(error)) from None

    def _read(self, peer: str, here: int, there: int, pieces: Sequence[Piece], over: OverCheck) -> None:
        agent = self._agent
        with self._lock, _vendor_errors():
            local = agent.get_xfer_descs([(here + a, size, 0) for a, _, size in pieces], "DRAM")
            remote = agent.get_xfer_descs([(there + b, size, 0) for _, b, size in pieces], "DRAM")
            transfer = agent.initialize_xfer("READ", local, remote, peer)
            state = agent.transfer(transfer)
        while state == "PROC":
            if over():
                raise self._linger(transfer)
            time.sleep(_SPIN)
            with self._lock, _vendor_errors():
                state = agent.check_xfer_state(transfer)
        with self._lock, _vendor_errors():
            agent.release_xfer_handle(transfer)
        if state != "DONE":
            raise _PeerLost(f"NIXL read ended as {state}")

    def _linger(self, transfer: Any) -> Unsettled:
        unsettled = Unsettled("the NIXL read did not end in time")
        with self._lock:
            self._lingering.append((transfer, unsettled))
        self._awake.set()
        return unsettled

    @contextlib.contextmanager
    def _borrowed_scratch(self) -> Iterator[_Scratch]:
        """A scratch buffer that a read was given up on is not used again before that read has ended."""
        try:
            scratch = self._scratch.get_nowait()
        except queue.Empty:
            scratch = _Scratch()
            with self._lock, _vendor_errors():
                self._register(scratch.address, SCRATCH_SIZE)
        try:
            yield scratch
        except Unsettled as unsettled:
            unsettled.then(lambda: self._scratch.put(scratch))
            raise
        except BaseException:
            self._scratch.put(scratch)
            raise
        self._scratch.put(scratch)

    def _register(self, address: int, size: int) -> None:
        self._agent.register_memory([(address, size, 0, "")], "DRAM")

    # ------------------------------------------------------------ peers

    def _connect(self, incarnation: str, remote: RemoteMemory) -> str:
        if remote.agent != incarnation:
            raise TransferError(f"the pool is of agent {remote.agent}, the handle of incarnation {incarnation}")
        with self._lock:
            name = self._peers.get(incarnation)
            if name is None:
                while len(self._peers) >= _PEERS:
                    self._forget(next(iter(self._peers)))
                try:
                    with _vendor_errors():
                        found = self._agent.add_remote_agent(remote.metadata)
                except _PeerLost as error:
                    raise TransferError(str(error)) from None
                name = found.decode() if isinstance(found, bytes) else str(found)
                if name != incarnation:
                    self._peers[name] = name  # whoever that is: loaded anew when it is needed
                    self._forget(name)
                    raise TransferError(f"the metadata is of agent {name}, the handle of incarnation {incarnation}")
            self._peers[incarnation] = name
            self._peers.move_to_end(incarnation)
            return name

    def _drop(self, incarnation: str) -> None:
        with self._lock:
            if incarnation in self._peers:
                self._forget(incarnation)

    def _forget(self, incarnation: str) -> None:
        name = self._peers.pop(incarnation)
        try:
            self._agent.remove_remote_agent(name)
        except Exception as error:  # noqa: BLE001 - the vendor's errors have no common base; the peer is gone anyway
            log.debug("NIXL peer %s: %s", name, error)

    # ------------------------------------------------------------ progress

    def _drive(self) -> None:
        while not self._closed:
            self._drive_once()
            if self._holding or self._lingering:
                time.sleep(self._poll_interval)
            else:
                # A reader whose hand-off has ended here may still wait for the rest of its bytes.
                self._awake.clear()
                self._awake.wait(_IDLE_POLL)

    def _drive_once(self) -> None:
        ended: list[Unsettled] = []
        with self._lock:
            try:
                self._agent.get_new_notifs()
            except Exception as error:  # noqa: BLE001 - a broken peer must not end the service for the others
                log.debug("NIXL progress: %s", error)
            for entry in list(self._lingering):
                if self._has_ended(entry[0]):
                    self._lingering.remove(entry)
                    ended.append(entry[1])
        for unsettled in ended:
            unsettled.settle()

    def _has_ended(self, transfer: Any) -> bool:
        try:
            if self._agent.check_xfer_state(transfer) == "PROC":
                return False
            self._agent.release_xfer_handle(transfer)
        except Exception as error:  # noqa: BLE001 - an error is an end as well: the connection is closed
            log.debug("a NIXL read that was given up: %s", error)
        return True


class _PeerLost(TransferError):
    pass


class _Scratch:
    def __init__(self) -> None:
        import ctypes

        self._mapping = mmap.mmap(-1, SCRATCH_SIZE)
        self.view = memoryview(self._mapping)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))


@contextlib.contextmanager
def _vendor_errors() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # noqa: BLE001 - the vendor's errors have no common base
        raise _PeerLost(f"{type(error).__name__}: {error}") from None


# ---------------------------------------------------------------- environment


def set_environment(host: str) -> None:
    """Before NIXL is imported. What the operator has set stays."""
    defaults = {
        "NIXL_LOG_LEVEL": "FATAL",
        "UCX_LOG_LEVEL": "fatal",
        "UCX_WARN_UNUSED_ENV_VARS": "n",
        # A host that is gone without a word: its connections end, and with them the reads that wait for it.
        "UCX_KEEPALIVE_INTERVAL": "5s",
        "UCX_TCP_KEEPIDLE": "5s",
        "UCX_TCP_KEEPINTVL": "2s",
        "UCX_TCP_USER_TIMEOUT": "15s",
        "UCX_CMA_SEG_SIZE": "8m",  # with UCX's 512k, a tenth of the bandwidth goes into system calls
    }
    device = None if _has_rdma() else interface_of(host)
    if device is not None:
        defaults["UCX_NET_DEVICES"] = device
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def _has_rdma() -> bool:
    """Naming an Ethernet device would shut the RDMA ones out."""
    return os.path.isdir("/sys/class/infiniband") and bool(os.listdir("/sys/class/infiniband"))


def interface_of(host: str) -> str | None:
    """The network interface with this IPv4 address; UCX would spread its bytes over all of them, loopback included."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        wanted = socket.inet_aton(socket.gethostbyname(host)) if host else b""
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                request = struct.pack("256s", name.encode())
                if fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24] == wanted:
                    return name
    return None
