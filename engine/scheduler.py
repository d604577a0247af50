"""Which tokens are computed in the next step.

First come, first served; all running decodes first, then prefill chunks from what is left of one token budget. A
request is admitted when the blocks for all that it may ever need can be reserved (TensorRT-LLM calls this
GUARANTEED_NO_EVICT): nothing is preempted and nothing deadlocks, at the price of a smaller batch when `max_tokens` is
far above what is generated. Reserved blocks keep serving as prefix cache until they are allocated.
"""

from __future__ import annotations

import dataclasses
from collections import deque

from engine.blocks import BlockPool
from engine.sequence import Capacity, Choice, Phase, Request
from engine.step import Chunk, SampleSpec


@dataclasses.dataclass(slots=True)
class Batch:
    """One step's work; `choices[i]` owns `chunks[i]`."""

    choices: list[Choice] = dataclasses.field(default_factory=list)
    chunks: list[Chunk] = dataclasses.field(default_factory=list)

    def draws(self) -> tuple[list[Choice], list[int], list[SampleSpec]]:
        """The tokens to draw: for which choice, from which row of the logits, and how. A prompt that is complete draws
        the first tokens of all choices of its request from one row."""
        choices: list[Choice] = []
        rows: list[int] = []
        row = 0
        for choice, chunk in zip(self.choices, self.chunks, strict=True):
            if chunk.wants_logits:
                drawn = [choice] if choice.generated else choice.request.open_choices()
                choices += drawn
                rows += [row] * len(drawn)
                row += 1
        return choices, rows, [choice.spec() for choice in choices]


class Scheduler:
    """Owns the queue, the running choices and, through `blocks`, what each of them holds."""

    def __init__(self, blocks: BlockPool, capacity: Capacity, max_num_tokens: int) -> None:
        self.blocks = blocks
        self.capacity = capacity
        self.max_num_tokens = max_num_tokens
        self.waiting: deque[Request] = deque()
        self.fetching: list[Request] = []
        self.running: list[Choice] = []
        self._places = 0  # in the batch, taken by admitted requests

    def __repr__(self) -> str:
        return (
            f"Scheduler(waiting {len(self.waiting)}, fetching {len(self.fetching)}, running {len(self.running)}, "
            f"places {self._places}/{self.capacity.max_batch_size}, {self.blocks!r})"
        )

    @property
    def busy(self) -> bool:
        """There is something to compute."""
        return bool(self.running)

    @property
    def prefilling(self) -> bool:
        return any(not choice.generated for choice in self.running)

    @property
    def requests_running(self) -> int:
        return len({id(choice.request) for choice in self.running})

    # ------------------------------------------------------------ requests

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def admit(self) -> Request | None:
        """The next request, if its blocks and its places are there; it holds its cached prefix then, and is to be given
        to `fetch` or `start`."""
        if not self.waiting:
            return None
        request = self.waiting[0]
        keys = request.prompt_keys
        if request.draws_first_token:
            # The last prompt token is always computed: its logits are the first draw.
            keys = keys[: (len(request.prompt_ids) - 1) // self.capacity.block_size]
        cached = self.blocks.match(keys)
        new = request.blocks_needed - len(cached)
        if self._places + request.places > self.capacity.max_batch_size or not self.blocks.can_reserve(new, cached):
            return None
        self.waiting.popleft()
        request.phase = Phase.RUNNING
        self._places += request.places
        self.blocks.acquire(cached)
        self.blocks.reserve(new)
        prompt = request.choices[0]
        prompt.table = cached
        prompt.keys = keys[: len(cached)]
        prompt.reserved = new
        prompt.computed = len(cached) * self.capacity.block_size
        return request

    def fetch(self, request: Request, blocks: int) -> list[int]:
        """Allocate the prompt's next `blocks` blocks, to be written by others until `start`."""
        request.phase = Phase.FETCHING
        self.fetching.append(request)
        return self._allocate(request.choices[0], blocks)

    def start(self, request: Request) -> None:
        """From here on its first choice is computed in steps."""
        if request.phase is Phase.FETCHING:
            self.fetching.remove(request)
            request.phase = Phase.RUNNING
        self.running.append(request.choices[0])

    def fork(self, request: Request) -> list[tuple[int, int]]:
        """Give the prompt's blocks and the reservation to the choices that go on. Full blocks are shared; a partial one
        is to be copied as told by the result, (from, to) pairs. Choices that have finished get nothing."""
        prompt = request.choices[0]
        going_on = [choice for choice in request.choices if choice.finish_reason is None]
        if not going_on:
            self.end(request)
            return []
        heir, *others = going_on
        if heir is not prompt:
            heir.take_over(prompt)
            self.running[self.running.index(prompt)] = heir
        self._give_up_places(request, request.places - len(going_on))
        share = request.blocks_per_choice - request.shared_blocks
        unneeded = share * (len(request.choices) - len(going_on))
        self.blocks.unreserve(unneeded)
        heir.reserved -= unneeded + share * len(others)
        return [copy for other in others for copy in self._branch(heir, other, share)]

    def _branch(self, heir: Choice, other: Choice, share: int) -> list[tuple[int, int]]:
        shared = heir.request.shared_blocks
        other.reserved = share
        other.table = heir.table[:shared]
        other.keys = heir.keys[:shared]
        other.computed = heir.computed
        self.blocks.acquire(other.table)
        self.running.append(other)
        return [(tail, self._allocate(other, 1)[0]) for tail in heir.table[shared:]]

    def advance(self, choice: Choice, tokens: int) -> list[tuple[bytes, int]]:
        """The KV of `tokens` more tokens is there; returns key and number of the blocks that became findable."""
        choice.computed += tokens
        found = []
        for index in range(len(choice.keys), choice.computed // self.capacity.block_size):
            key = choice.next_key(self.capacity.block_size)
            choice.keys.append(key)
            if self.blocks.register(choice.table[index], key):
                found.append((key, choice.table[index]))
        return found

    def finish(self, choice: Choice) -> None:
        """Give back all that one choice holds."""
        if choice in self.running:
            self.running.remove(choice)
            self._give_up_places(choice.request, 1)
        self._give_up_blocks(choice)

    def end(self, request: Request) -> None:
        """Give back all that a request holds, in whatever phase it is."""
        if request.phase is Phase.WAITING:
            self.waiting.remove(request)
            request.places = 0
        elif request.phase is Phase.FETCHING:
            self.fetching.remove(request)
        for choice in request.choices:
            if choice in self.running:
                self.running.remove(choice)
            self._give_up_blocks(choice)
        self._give_up_places(request, request.places)
        request.phase = Phase.ENDED

    def _give_up_blocks(self, choice: Choice) -> None:
        self.blocks.release(choice.table)
        self.blocks.unreserve(choice.reserved)
        choice.table = []
        choice.reserved = 0

    def _give_up_places(self, request: Request, places: int) -> None:
        request.places -= places
        self._places -= places

    # ------------------------------------------------------------ steps

    def schedule(self) -> Batch:
        batch = Batch()
        budget = self.max_num_tokens
        decoding = [choice for choice in self.running if choice.generated]
        prefilling = [choice for choice in self.running if not choice.generated]
        for choice in decoding + prefilling:
            take = min(budget, choice.pending)
            if not take:
                break
            budget -= take
            batch.choices.append(choice)
            batch.chunks.append(self._chunk(choice, take))
        return batch

    def _chunk(self, choice: Choice, take: int) -> Chunk:
        start, end = choice.computed, choice.computed + take
        missing = self.capacity.blocks(end) - len(choice.table)
        if missing > 0:
            self._allocate(choice, missing)
        for block in choice.table[start // self.capacity.block_size :]:
            self.blocks.check_writable(block)
        complete = end == len(choice.tokens)
        wants_logits = complete and (choice.generated > 0 or choice.request.draws_first_token)
        return Chunk(choice.tokens[start:end], start, choice.table, wants_logits)

    def _allocate(self, choice: Choice, count: int) -> list[int]:
        blocks = self.blocks.allocate(count)
        choice.reserved -= count
        choice.table += blocks
        return blocks
