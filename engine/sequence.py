"""A request inside the engine, and its choices: tokens, blocks, and when they end."""

from __future__ import annotations

import dataclasses
import enum

from engine.messages import SamplingParams, Submit, Timing, TokenLogprob
from engine.step import Sampled, SampleSpec
from engine.transfers import FetchJob
from kvstore.errors import ContextLengthExceeded, HandoffRefused, InvalidRequest
from kvstore.handoff import Handle, StartState, prompt_digest
from kvstore.hashing import block_keys

_SEED_MASK = 2**63 - 1


class Phase(enum.Enum):
    WAITING = "waiting"  # for blocks and a place in the batch
    FETCHING = "fetching"  # blocks come from elsewhere
    RUNNING = "running"
    ENDED = "ended"


@dataclasses.dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the engine core needs to know of the model."""

    fingerprint: str  # Fingerprint.digest()
    vocab_size: int
    max_seq_len: int
    eos_token_ids: frozenset[int]


@dataclasses.dataclass(frozen=True, slots=True)
class Capacity:
    num_blocks: int
    block_size: int
    max_batch_size: int

    def blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_size)


class Choice:
    """One sequence: the prompt and what was generated after it. Until the prompt's KV is complete, a request has one
    choice, which stands for all.

    `computed` tokens of `tokens` have their KV in the blocks of `table`, the first `len(keys)` of which have keys.
    `reserved` blocks may still be allocated.
    """

    __slots__ = ("computed", "finish_reason", "index", "keys", "request", "reserved", "seed", "table", "tokens")

    def __init__(self, request: Request, index: int, tokens: list[int]) -> None:
        self.request = request
        self.index = index
        self.tokens = tokens
        self.computed = 0
        self.table: list[int] = []
        self.keys: list[bytes] = []
        self.reserved = 0
        self.seed = (request.sampling.seed + index) & _SEED_MASK
        self.finish_reason: str | None = None

    @property
    def generated(self) -> int:
        return len(self.tokens) - len(self.request.prompt_ids)

    @property
    def pending(self) -> int:
        """Tokens whose KV is to be computed before the next one can be drawn."""
        return len(self.tokens) - self.computed

    def __repr__(self) -> str:
        return (
            f"Choice({self.request.id}[{self.index}] {self.computed}/{len(self.tokens)} tokens, "
            f"{len(self.table)} blocks + {self.reserved})"
        )

    def take_over(self, other: Choice) -> None:
        """All that `other` holds; it holds nothing then."""
        self.computed, self.table, self.keys, self.reserved = other.computed, other.table, other.keys, other.reserved
        other.table, other.reserved = [], 0

    def next_key(self, block_size: int) -> bytes:
        """Of the first block that has none yet."""
        index = len(self.keys)
        if index < len(self.request.prompt_keys):
            return self.request.prompt_keys[index]
        tokens = self.tokens[index * block_size : (index + 1) * block_size]
        parent = self.keys[-1] if self.keys else None
        return block_keys(tokens, block_size, self.request.salt, parent=parent)[0]

    def spec(self) -> SampleSpec:
        """How to draw this choice's next token."""
        sampling = self.request.sampling
        return SampleSpec(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=self.seed,
            position=self.generated,
            banned=self.request.banned if self.generated < sampling.min_tokens else (),
            logprobs=sampling.logprobs,
        )

    def append(self, token: int) -> int | None:
        """Takes a generated token and sets `finish_reason` if it is the last; returns the stop reason."""
        self.tokens.append(token)
        request = self.request
        if token in request.eos:
            self.finish_reason = "stop"
        elif token in request.stop_ids:
            self.finish_reason = "stop"
            return token
        elif self.generated >= request.max_new_tokens:
            self.finish_reason = "length"
        return None


class Request:
    """Made by `open_request`, which has checked that it can be served at all."""

    def __init__(self, submit: Submit, arrival: float, facts: ModelFacts, capacity: Capacity) -> None:
        sampling = submit.sampling
        self.id = submit.request_id
        self.prompt_ids = submit.prompt_ids
        self.sampling: SamplingParams = sampling
        self.handoff_id = submit.handoff_id
        self.handle: Handle | None = submit.handle
        self.salt = submit.handle.cache_salt if submit.handle else submit.cache_salt
        self.arrival = arrival
        self.phase = Phase.WAITING
        self.max_new_tokens = min(sampling.max_tokens, facts.max_seq_len - len(submit.prompt_ids))
        self.eos: frozenset[int] = frozenset() if sampling.ignore_eos else facts.eos_token_ids
        self.stop_ids = frozenset(sampling.stop_token_ids)
        self.banned = tuple(sorted(token for token in self.eos | self.stop_ids if 0 <= token < facts.vocab_size))
        self.prompt_keys = block_keys(submit.prompt_ids, capacity.block_size, self.salt)
        self.choices = [Choice(self, 0, list(submit.prompt_ids))]
        self.fetch: FetchJob | None = None
        self.cached_tokens = 0  # prompt tokens that were not computed here
        self.timing = Timing()
        self.announced = False  # the first output is out
        self.places = 1 if submit.handoff_id is not None else sampling.n  # in the batch

        whole = capacity.blocks(len(submit.prompt_ids))
        if self.handoff_id is None:
            whole = capacity.blocks(len(submit.prompt_ids) + self.max_new_tokens - 1)
        self.blocks_per_choice = whole
        self.shared_blocks = len(self.prompt_keys)  # full blocks of the prompt, common to all choices

    @property
    def blocks_needed(self) -> int:
        """At most, from admission to the end, blocks found in the prefix cache included."""
        extra = 0 if self.handoff_id is not None else self.sampling.n - 1
        return self.blocks_per_choice + extra * (self.blocks_per_choice - self.shared_blocks)

    @property
    def draws_first_token(self) -> bool:
        """False when the first tokens came with a hand-off."""
        return self.handle is None

    def open_choices(self) -> list[Choice]:
        """All choices, at the end of the prompt."""
        for index in range(len(self.choices), self.sampling.n):
            self.choices.append(Choice(self, index, list(self.prompt_ids)))
        return self.choices

    def __repr__(self) -> str:
        return f"Request({self.id} {self.phase.value} {self.choices})"


def open_request(submit: Submit, arrival: float, facts: ModelFacts, capacity: Capacity) -> Request:
    """Raises InvalidRequest, ContextLengthExceeded or HandoffRefused if this request can never be served here."""
    prompt = submit.prompt_ids
    sampling = submit.sampling
    if not prompt:
        raise InvalidRequest("prompt: no tokens, at least one is needed", param="prompt")
    if min(prompt) < 0 or max(prompt) >= facts.vocab_size:
        wrong = next(token for token in prompt if not 0 <= token < facts.vocab_size)
        raise InvalidRequest(f"prompt: token id {wrong} is outside 0..{facts.vocab_size - 1}", param="prompt")
    if len(prompt) >= facts.max_seq_len:
        raise ContextLengthExceeded(
            f"The prompt has {len(prompt)} tokens; with at least one to generate, "
            f"this model's context length of {facts.max_seq_len} allows {facts.max_seq_len - 1}.",
            param="prompt",
        )
    if sampling.max_tokens < 1:
        raise InvalidRequest(f"max_tokens: {sampling.max_tokens} is less than 1", param="max_tokens")
    if not 1 <= sampling.n <= capacity.max_batch_size:
        raise InvalidRequest(f"n: {sampling.n} is outside 1..{capacity.max_batch_size}", param="n")
    if submit.handle is not None:
        _check_handle(submit, submit.handle, facts, capacity)
    request = Request(submit, arrival, facts, capacity)
    if request.blocks_needed > capacity.num_blocks:
        raise ContextLengthExceeded(
            f"{len(prompt)} prompt tokens with n = {sampling.n} and max_tokens = {request.max_new_tokens} need "
            f"{request.blocks_needed} KV blocks of {capacity.block_size} tokens, of {capacity.num_blocks} here.",
            param="prompt" if capacity.blocks(len(prompt)) > capacity.num_blocks else "max_tokens",
        )
    return request


_STATE = "disaggregated_params.encoded_opaque_state"


def _check_handle(submit: Submit, handle: Handle, facts: ModelFacts, capacity: Capacity) -> None:
    prompt = submit.prompt_ids
    if submit.handoff_id is not None:
        raise InvalidRequest("disaggregated_params: both context-only and generation-only", param=_STATE)
    if handle.fingerprint != facts.fingerprint:
        raise HandoffRefused(
            f"the KV blocks were computed by a worker of fingerprint {handle.fingerprint}, "
            f"this worker has {facts.fingerprint}: model, tokenizer, dtype or block size differ",
            param=_STATE,
        )
    if handle.prompt_tokens != len(prompt):
        raise HandoffRefused(
            f"the hand-off is of {handle.prompt_tokens} prompt tokens, the request has {len(prompt)}", param=_STATE
        )
    if handle.prompt_digest and handle.prompt_digest != prompt_digest(prompt, handle.cache_salt):
        raise HandoffRefused("the hand-off is of another prompt than the request's", param=_STATE)
    if len(handle.block_ids) != capacity.blocks(len(prompt)):
        raise InvalidRequest(
            f"{_STATE}: {len(handle.block_ids)} blocks of {capacity.block_size} for {len(prompt)} tokens", param=_STATE
        )
    indexes = sorted(start.index for start in handle.starts)
    if indexes != list(range(submit.sampling.n)):
        raise InvalidRequest(f"{_STATE}: starts for choices {indexes}, n is {submit.sampling.n}", param=_STATE)
    for start in handle.starts:
        if not 0 <= start.token < facts.vocab_size:
            raise InvalidRequest(f"{_STATE}: token id {start.token} is outside the vocabulary", param=_STATE)


def logprobs_of(sampled: Sampled) -> list[TokenLogprob] | None:
    if sampled.logprob is None:
        return None
    return [TokenLogprob(sampled.token, sampled.logprob, sampled.top or [])]


def sampled_of(start: StartState) -> Sampled:
    """A replayed first token, as if it had just been drawn."""
    return Sampled(start.token, start.logprob, start.top_logprobs)
