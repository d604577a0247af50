"""Guided decoding: answers that match a JSON schema, a regular expression, an EBNF grammar or a structural tag.

    Submit ──► compiling (a thread of its own) ──► waiting ──► … each choice has a `Guide`: mask → draw → accept
                    └─ it does not compile ──► Failed, before any block is taken

The state of a guide is a function of the tokens accepted: whoever gets a request by a hand-off compiles the same text
and accepts the first tokens. The libraries are loaded when the first guided request comes.
"""

from __future__ import annotations

import dataclasses
import logging
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from engine.messages import GuidedDecoding
from engine.step import Words
from engine.vocabulary import Vocabulary

log = logging.getLogger(__name__)

BACKENDS = ("xgrammar", "llguidance")
SEPARATORS = (", ", ": ")  # of JSON, and no other space: both backends give the same masks so
_CACHED = 128  # compiled grammars


class GuideError(ValueError):
    """A grammar that does not compile, or a token that it does not allow."""


class Guide(Protocol):
    """The place of one choice in its grammar."""

    @property
    def mask(self) -> Words:
        """The tokens that may come next, EOS among them where the grammar is complete. Valid until `accept`."""

    @property
    def finished(self) -> bool:
        """Nothing but EOS can follow."""

    def accept(self, token: int) -> None:
        """GuideError if the grammar does not allow it."""


class Grammar(Protocol):
    def start(self) -> Guide:
        """At the beginning; for one choice."""


class Backend(Protocol):
    def compile(self, wanted: GuidedDecoding) -> Grammar:
        """GuideError says what is wrong with the text."""


@dataclasses.dataclass(slots=True)
class GuideCompiled:
    """To the engine loop: `grammar`, or why there is none."""

    request_id: str
    wanted: GuidedDecoding
    grammar: Grammar | None
    error: str = ""


class GuideCompiler:
    """Compiles on a thread of its own, which `close` ends; keeps what it has compiled."""

    def __init__(self, backend: Callable[[], Backend]) -> None:
        """`backend` is called on the thread, when the first request comes."""
        self._make_backend = backend
        self._backend: Backend | None = None
        self._cache: OrderedDict[GuidedDecoding, Grammar] = OrderedDict()  # the loop's
        self._jobs: queue.SimpleQueue[tuple[str, GuidedDecoding, Callable[[GuideCompiled], None]] | None] = (
            queue.SimpleQueue()
        )
        self._thread: threading.Thread | None = None

    def compile(self, request_id: str, wanted: GuidedDecoding, post: Callable[[GuideCompiled], None]) -> None:
        """`post` gets the result, now or from the thread."""
        if (grammar := self._cache.get(wanted)) is not None:
            self._cache.move_to_end(wanted)
            post(GuideCompiled(request_id, wanted, grammar))
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="guides", daemon=True)
            self._thread.start()
        self._jobs.put((request_id, wanted, post))

    def keep(self, compiled: GuideCompiled) -> None:
        """Told by the loop, which alone reads the cache."""
        if compiled.grammar is not None:
            self._cache[compiled.wanted] = compiled.grammar
            if len(self._cache) > _CACHED:
                self._cache.popitem(last=False)

    def close(self, timeout: float) -> None:
        """A library's call cannot be interrupted: the thread is left behind when it takes longer, in seconds."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(timeout)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            request_id, wanted, post = job
            started = time.monotonic()
            try:
                result = GuideCompiled(request_id, wanted, self._compiled(wanted))
            except GuideError as error:
                result = GuideCompiled(request_id, wanted, None, str(error))
            except Exception as error:  # foreign code must not end the thread that all requests share
                log.exception("compiling a grammar failed")
                result = GuideCompiled(request_id, wanted, None, f"{type(error).__name__}: {error}")
            log.debug("%s compiled in %.1f ms", wanted.kind, (time.monotonic() - started) * 1000)
            post(result)

    def _compiled(self, wanted: GuidedDecoding) -> Grammar:
        if self._backend is None:
            self._backend = self._make_backend()
        return self._backend.compile(wanted)


def backend_named(name: str, vocabulary: Vocabulary) -> Backend:
    """`name` is one of BACKENDS. GuideError if the library is not installed."""
    try:
        if name == "xgrammar":
            from engine.guided_xgrammar import XgrammarBackend

            return XgrammarBackend(vocabulary)
        from engine.guided_llguidance import LlguidanceBackend

        return LlguidanceBackend(vocabulary)
    except ImportError as error:
        raise GuideError(f"the library of guided_decoding_backend {name} is not installed ({error})") from error


def words_of(tokens: Sequence[int], vocab_size: int) -> Words:
    words = np.zeros((vocab_size + 31) // 32, np.uint32)
    for token in tokens:
        words[token // 32] |= np.uint32(1 << token % 32)
    return words.view(np.int32)


def without(mask: Words, banned: Sequence[int]) -> Words:
    """`mask` less the banned tokens; `mask` itself where that would leave nothing: the grammar goes first."""
    if not banned:
        return mask
    left = mask & ~words_of(banned, len(mask) * 32)
    return left if left.any() else mask
