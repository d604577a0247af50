"""Which tokens are computed in the next step.

One token budget a step: running decodes first, then prefill chunks (engine.budget). Requests wait in order of arrival,
or of priority. Two rules for when one is admitted, with TensorRT-LLM's names:

    GUARANTEED_NO_EVICT  when the blocks for all that it may ever need can be reserved: nothing is preempted and nothing
                         deadlocks, at the price of a smaller batch when `max_tokens` is far above what is generated
    MAX_UTILIZATION      when the blocks of its prompt are there; if the pool runs dry later, the choice that matters
                         least gives up its blocks, and is computed again when there is room

A choice draws the same tokens in both: all that a draw depends on are its tokens and its place in them. Reserved blocks
keep serving as prefix cache until they are allocated.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable

from engine.batch import Batch
from engine.blocks import BlockPool
from engine.budget import Span, decode_limit, share
from engine.prefix_aware import is_being_computed, worth_waiting
from engine.rules import Rules
from engine.sequence import Capacity, Choice, Phase, Request
from engine.step import Chunk

_PASSED_OVER = 16  # requests at the head of the queue that are looked at for one that need not wait for a prefix
_RESUME_HEADROOM = 20  # 1/20 of all blocks stay free when a choice is admitted beside others that grow


def _no_copy(_source: int, _target: int) -> None:
    pass


class Scheduler:
    """Owns the queue, the running choices and, through `blocks`, what each of them holds.

    `copy_block(from, to)` is called for a block of which a prompt can use the beginning."""

    def __init__(
        self,
        blocks: BlockPool,
        capacity: Capacity,
        max_num_tokens: int,
        rules: Rules | None = None,
        copy_block: Callable[[int, int], None] = _no_copy,
    ) -> None:
        self.blocks = blocks
        self.capacity = capacity
        self.max_num_tokens = max_num_tokens
        self.rules = rules or Rules()
        self.waiting: list[Request] = []  # the next one first
        self.fetching: list[Request] = []
        self.running: list[Choice] = []
        self.paused: list[Choice] = []  # preempted, the next to go on first
        self.batch = Batch()  # of the newest step
        self.preemptions = 0
        self.reused_blocks = 0
        self.missed_blocks = 0
        self._worth_waiting = worth_waiting(max_num_tokens, capacity.block_size)
        self._copy_block = copy_block
        self._places = 0  # in the batch, taken by admitted requests
        self._arrivals = 0
        self._turn = 0  # of decodes that do not all fit into a step
        if self.rules.partial_reuse:
            blocks.index_followers()

    def __repr__(self) -> str:
        return (
            f"Scheduler(waiting {len(self.waiting)}, fetching {len(self.fetching)}, running {len(self.running)}, "
            f"paused {len(self.paused)}, places {self._places}/{self.capacity.max_batch_size}, {self.blocks!r})"
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

    @property
    def requests_paused(self) -> int:
        return len({id(choice.request) for choice in self.paused})

    # ------------------------------------------------------------ requests

    def add(self, request: Request) -> None:
        request.phase = Phase.WAITING
        request.order = self._arrivals
        self._arrivals += 1
        bisect.insort(self.waiting, request, key=self._rank)

    def admit(self) -> Request | None:
        """The next request, if its blocks and its places are there; it holds its cached prefix then, and is to be given
        to `fetch` or `start`. One that had better wait for another's prefix is passed over."""
        for request in self.waiting[:_PASSED_OVER]:
            if self.paused and self._rank(self.paused[0].request) < self._rank(request):
                return None
            keys = self._usable_keys(request.choices[0])
            found = self.blocks.match(keys)
            if self.rules.prefix_aware and is_being_computed(keys, len(found), self._worth_waiting, self.running):
                continue
            return request if self._take_from_queue(request, keys, found) else None
        return None

    def _take_from_queue(self, request: Request, keys: list[bytes], found: list[int | None]) -> bool:
        prompt = request.choices[0]
        needed = self.capacity.blocks(len(request.prompt_ids)) if self.rules.preempts else request.blocks_needed
        if not self._fits(needed, found, request.places):
            return False
        self.waiting.remove(request)
        request.phase = Phase.RUNNING
        self._take_in(prompt, keys, found, needed, request.places)
        self.reused_blocks += len(prompt.keys)
        self.missed_blocks += self.capacity.blocks(len(request.prompt_ids)) - len(prompt.keys)
        if self.rules.partial_reuse and request.draws_first_token and not request.scores_prompt:
            self._reuse_part(prompt)
        return True

    def resume(self) -> None:
        """Let preempted choices go on, as many as there is room for."""
        while self.paused:
            choice = self.paused[0]
            keys = choice.keys if choice.generated else self._usable_keys(choice)
            keys = keys[: (len(choice.tokens) - 1) // self.capacity.block_size]  # a step of it has to draw
            found = self.blocks.match(keys)
            needed = self.capacity.blocks(len(choice.tokens))
            places = 1 if choice.generated or choice.request.handoff_id is not None else choice.request.sampling.n
            if not self._fits(needed, found, places):
                return
            self.paused.pop(0)
            choice.request.places += places
            self._take_in(choice, keys, found, needed, places)
            self.running.append(choice)

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

    def _rank(self, request: Request) -> tuple[float, int]:
        """Lower goes first."""
        return (-request.priority if self.rules.by_priority else 0.0, request.order)

    def _usable_keys(self, choice: Choice) -> list[bytes]:
        """Of a prompt's blocks that need not be computed if they are found."""
        request = choice.request
        if request.scores_prompt:
            return []  # every prompt token is computed: its logits are asked for
        if request.draws_first_token:
            # The last prompt token is always computed: its logits are the first draw.
            return request.prompt_keys[: (len(request.prompt_ids) - 1) // self.capacity.block_size]
        return request.prompt_keys

    def _fits(self, needed: int, found: list[int | None], places: int) -> bool:
        if self._places + places > self.capacity.max_batch_size:
            return False
        new = needed - sum(block is not None for block in found)
        if self.rules.preempts and self.running:
            new += min(len(self.running), self.blocks.num_blocks // _RESUME_HEADROOM)
        return self.blocks.can_reserve(new, found)

    def _take_in(self, choice: Choice, keys: list[bytes], found: list[int | None], needed: int, places: int) -> None:
        """Its place, its cached blocks, and the reservation of the others."""
        self._places += places
        self.blocks.reserve(needed - sum(block is not None for block in found))
        choice.table = self.blocks.claim(keys[: len(found)], found)
        choice.keys = keys[: len(found)]
        choice.reserved = needed - len(found)
        choice.computed = len(found) * self.capacity.block_size
        self._note_retention(choice)

    def _note_retention(self, choice: Choice) -> None:
        if choice.request.retention is not None:
            for index, block in enumerate(choice.table):
                self.blocks.set_priority(block, *choice.retention_of(index, self.capacity.block_size))

    def _reuse_part(self, prompt: Choice) -> None:
        """Copy the block that begins as the prompt goes on, and leave only the rest to be computed."""
        size = self.capacity.block_size
        first = len(prompt.table)
        wanted = prompt.tokens[first * size : min((first + 1) * size, len(prompt.tokens) - 1)]
        source, common = self.blocks.similar(prompt.parent_key(), wanted)
        if not common:
            return
        self.blocks.acquire([source])
        if self.blocks.can_reserve(0):  # the source may have been counted on
            [target] = self._allocate(prompt, 1)
            self._copy_block(source, target)
            prompt.computed += common
        self.blocks.release([source])

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
        share = 0 if self.rules.preempts else request.blocks_per_choice - request.shared_blocks
        unneeded = share * (len(request.choices) - len(going_on))
        self.blocks.unreserve(unneeded)
        heir.reserved -= unneeded + share * len(others)
        return [copy for other in others for copy in self._branch(heir, other, share)]

    def _branch(self, heir: Choice, other: Choice, share: int) -> list[tuple[int, int]]:
        shared = heir.request.shared_blocks
        other.keys = heir.keys[:shared]
        tails = heir.table[shared:]
        if self.rules.preempts and not self._reserve_for(other, len(tails)):
            self._pause(other)
            return []
        other.reserved += share
        other.table = heir.table[:shared]
        other.computed = heir.computed
        self.blocks.acquire(other.table)
        self.running.append(other)
        return [(tail, self._allocate(other, 1)[0]) for tail in tails]

    def advance(self, choice: Choice, tokens: int) -> list[tuple[bytes, int]]:
        """The KV of `tokens` more tokens is there; returns key and number of the blocks that became findable."""
        choice.computed += tokens
        size = self.capacity.block_size
        found = []
        for index in range(len(choice.keys), choice.computed // size):
            parent = choice.parent_key()
            key = choice.next_key(size)
            choice.keys.append(key)
            content = choice.tokens[index * size : (index + 1) * size]
            kept = choice.retention_of(index, size)
            if self.blocks.register(choice.table[index], key, parent, content, *kept):
                found.append((key, choice.table[index]))
        return found

    def restart(self, request: Request) -> None:
        """Back to its place in the queue with nothing, before any of its tokens was drawn."""
        if request.phase is Phase.FETCHING:
            self.fetching.remove(request)
        prompt = request.choices[0]
        self._give_up_blocks(prompt)
        prompt.computed = 0
        prompt.keys = []
        self._places -= request.places
        request.phase = Phase.WAITING
        bisect.insort(self.waiting, request, key=self._rank)

    def finish(self, choice: Choice) -> None:
        """Give back all that one choice holds."""
        if choice in self.running:
            self.running.remove(choice)
            self._give_up_places(choice.request, 1)
        elif choice in self.paused:
            self.paused.remove(choice)
        self._give_up_blocks(choice)

    def end(self, request: Request) -> None:
        """Give back all that a request holds, in whatever phase it is."""
        if request.phase is Phase.WAITING:
            self.waiting.remove(request)
            request.places = 0
        elif request.phase in (Phase.COMPILING, Phase.HELD):
            request.places = 0
        elif request.phase is Phase.FETCHING:
            self.fetching.remove(request)
        for choice in request.choices:
            if choice in self.running:
                self.running.remove(choice)
            elif choice in self.paused:
                self.paused.remove(choice)
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

    # ------------------------------------------------------------ preemption

    def _reserve_for(self, choice: Choice, count: int) -> bool:
        """Reserve blocks that an admission has not counted, if they are there."""
        if not self.blocks.can_reserve(count):
            return False
        self.blocks.reserve(count)
        choice.reserved += count
        return True

    def _make_room(self, choice: Choice, count: int) -> bool:
        """Reserve `count` blocks, by preempting choices that matter less and are not part of the step; if there are
        none, `choice` itself is preempted. Prompts that are handed off keep their blocks: their reader may be reading
        them."""
        while not self._reserve_for(choice, count):
            kept = {id(each) for each in self.batch.choices}
            others = [
                each
                for each in self.running
                if each is choice or (id(each) not in kept and each.request.handoff_id is None)
            ]
            victim = max(others, key=lambda each: (*self._rank(each.request), each.index))
            self._preempt(victim)
            if victim is choice:
                return False
        return True

    def _preempt(self, choice: Choice) -> None:
        self.preemptions += 1
        self.running.remove(choice)
        # Before its choices are there, the prompt holds the places of all.
        self._give_up_places(choice.request, 1 if choice.generated else choice.request.places)
        self._pause(choice)

    def _pause(self, choice: Choice) -> None:
        self._give_up_blocks(choice)
        choice.computed = 0
        if choice.request.scores_prompt and not choice.generated:
            choice.request.prompt_logprobs.clear()
        bisect.insort(self.paused, choice, key=lambda each: (*self._rank(each.request), each.index))

    # ------------------------------------------------------------ steps

    def schedule(self) -> Batch:
        """The next step. With MAX_UTILIZATION it may be empty: then everything was preempted."""
        self.batch = Batch()
        decoding = [choice for choice in self.running if choice.generated and choice.pending == 1]
        prompts = [choice for choice in self.running if not choice.generated or choice.pending > 1]
        limit = decode_limit(self.max_num_tokens, len(decoding), len(prompts))
        for choice in self._in_turn(decoding, limit):
            self._put(choice, 1)
        if self.rules.by_priority:
            prompts.sort(key=lambda choice: self._rank(choice.request))
        spans = [Span(choice.computed, choice.pending) for choice in prompts]
        budget = self.max_num_tokens - len(self.batch.chunks)
        for index, take in share(self.rules.chunking, budget, spans, self.capacity.block_size):
            self._put(prompts[index], take)
        return self.batch

    def _in_turn(self, decoding: list[Choice], limit: int) -> list[Choice]:
        if limit < len(decoding):
            first = self._turn % len(decoding)
            self._turn += limit
            decoding = (decoding[first:] + decoding[:first])[:limit]
        if self.rules.preempts:
            decoding.sort(key=lambda choice: (*self._rank(choice.request), choice.index))
        return decoding

    def _put(self, choice: Choice, take: int) -> None:
        """Into the step, if it is not preempted by now and its blocks are there."""
        if self.rules.preempts:
            if not choice.table and not choice.reserved:
                return
            missing = self.capacity.blocks(choice.computed + take) - len(choice.table)
            if missing > choice.reserved and not self._make_room(choice, missing - choice.reserved):
                return
        self.batch.choices.append(choice)
        self.batch.chunks.append(self._chunk(choice, take))

    def _chunk(self, choice: Choice, take: int) -> Chunk:
        start, end = choice.computed, choice.computed + take
        missing = self.capacity.blocks(end) - len(choice.table)
        if missing > 0:
            self._allocate(choice, missing)
        for block in choice.table[start // self.capacity.block_size :]:
            self.blocks.check_writable(block)
        complete = end == len(choice.tokens)
        wants_logits = complete and (choice.generated > 0 or choice.request.draws_first_token)
        wants_all = choice.request.scores_prompt and not choice.generated
        return Chunk(choice.tokens[start:end], start, choice.table, wants_logits, wants_all)

    def _allocate(self, choice: Choice, count: int) -> list[int]:
        blocks = self.blocks.allocate(count)
        choice.reserved -= count
        choice.table += blocks
        return blocks
