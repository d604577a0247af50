"""A request inside the engine, and its choices: tokens, blocks, and when they end."""

from __future__ import annotations

import dataclasses
import enum

import numpy as np

from engine.eviction import DEFAULT_PRIORITY, MAX_PRIORITY, MIN_PRIORITY
from engine.guided import Grammar, Guide, without
from engine.messages import SamplingParams, Submit, Timing, TokenLogprob
from engine.penalties import BadWords, TokenCounts
from engine.step import Chunk, Sampled, SampleSpec, Shaping
from engine.transfers import FetchJob
from kvstore.errors import ContextLengthExceeded, HandoffRefused, InvalidRequest
from kvstore.handoff import Handle, StartState, prompt_digest
from kvstore.hashing import block_keys, chain_seed
from kvstore.protocol import Fingerprint

_SEED_MASK = 2**63 - 1


class Phase(enum.Enum):
    COMPILING = "compiling"  # its grammar, before it is queued
    WAITING = "waiting"  # for blocks and a place in the batch
    HELD = "held"  # until a generation worker has made room for the prompt (engine.readers)
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
    identity: Fingerprint | None = None


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
    `reserved` blocks may still be allocated. `shaping` and `guide` follow from prompt and generated tokens alone.
    """

    __slots__ = (
        "computed", "finish_reason", "guide", "index", "keys", "request", "reserved", "seed", "shaping", "table",
        "tokens",
    )  # fmt: skip

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
        self.shaping: Shaping | None = None
        self.guide: Guide | None = None

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

    def parent_key(self) -> bytes:
        """Of the block before that one."""
        return self.keys[-1] if self.keys else chain_seed(self.request.salt)

    def retention_of(self, index: int, block_size: int) -> tuple[int, float | None]:
        """Priority of block number `index` in the prefix cache, and for how many seconds it holds."""
        retention = self.request.retention
        if retention is None:
            return DEFAULT_PRIORITY, None
        start = index * block_size
        if start >= len(self.request.prompt_ids):
            return retention.decode_priority, retention.decode_seconds
        for span in retention.ranges:
            if span.start <= start and (span.end is None or start < span.end):
                return span.priority, span.seconds
        return DEFAULT_PRIORITY, None

    def begin(self) -> None:
        """The prompt is complete: from here on tokens are drawn."""
        if self.request.grammar is not None:
            self.guide = self.request.grammar.start()
        self.shaping = self.request.new_shaping()

    def spec(self) -> SampleSpec:
        """How to draw this choice's next token."""
        sampling = self.request.sampling
        position = self.generated
        banned = self._banned()
        if self.guide is not None and self.shaping is not None:
            self.shaping.mask = without(self.guide.mask, banned)
            banned = ()
        return SampleSpec(
            temperature=sampling.temperature,
            top_p=max(sampling.top_p * sampling.top_p_decay**position, sampling.top_p_min),
            top_k=sampling.top_k,
            seed=self.seed,
            position=position,
            banned=banned,
            logprobs=sampling.logprobs,
            min_p=sampling.min_p,
            shaping=self.shaping,
            processed_logprobs=sampling.processed_logprobs,
        )

    def prompt_specs(self, chunk: Chunk) -> list[SampleSpec]:
        """Of each row of the chunk, the prompt token that it predicts, to be scored."""
        following = self.request.prompt_ids[chunk.start + 1 : chunk.start + len(chunk.tokens) + 1]
        count = self.request.sampling.prompt_logprobs
        return [SampleSpec(forced=token, logprobs=count) for token in following]

    def _banned(self) -> tuple[int, ...]:
        request = self.request
        banned = request.banned if self.generated < request.sampling.min_tokens else ()
        if request.bad_words is not None:
            banned += request.bad_words.banned(self.tokens, len(request.prompt_ids))
        return banned

    def append(self, token: int) -> int | None:
        """Takes a generated token and sets `finish_reason` if it is the last; returns the stop reason. GuideError if
        the grammar does not allow it, which can only be of a token that another worker drew."""
        self.tokens.append(token)
        request = self.request
        if self.shaping is not None and self.shaping.counts is not None:
            self.shaping.counts.add(token)
        if token in request.eos:
            self.finish_reason = "stop"
            return None
        if token in request.stop_ids:
            self.finish_reason = "stop"
            return token
        if self.guide is not None:
            self.guide.accept(token)
        if self.guide is not None and self.guide.finished:
            self.finish_reason = "stop"
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
        self.priority = submit.priority
        self.retention = submit.retention
        self.order = 0  # among all requests of this engine; set when it is queued
        self.arrival = arrival
        self.phase = Phase.WAITING
        self.max_new_tokens = min(sampling.max_tokens, facts.max_seq_len - len(submit.prompt_ids))
        self.eos: frozenset[int] = frozenset() if sampling.ignore_eos else facts.eos_token_ids
        self.stop_ids = frozenset(sampling.stop_token_ids)
        self.banned = tuple(sorted(token for token in self.eos | self.stop_ids if 0 <= token < facts.vocab_size))
        self.bad_words = BadWords(sampling.bad_words) if sampling.bad_words else None
        self.grammar: Grammar | None = None  # compiled before the request is queued
        self.waits_for_reader = submit.waits_for_reader
        self.awaits = submit.awaits  # a hand-off; its handle is still to come
        self.source = submit.source
        self.prompt_logprobs: list[TokenLogprob] = []
        if submit.handle is not None:
            self.take_handle(submit.handle)
        self.prompt_keys = block_keys(submit.prompt_ids, capacity.block_size, self.salt)
        self.choices = [Choice(self, 0, list(submit.prompt_ids))]
        self.fetch: FetchJob | None = None
        self.cached_tokens = 0  # prompt tokens that were not computed here
        self.timing = Timing()
        self.announced = False  # the first output is out
        self.opened = False  # the prompt is complete, and all choices are there
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

    def take_handle(self, handle: Handle) -> None:
        """Go on from another worker's prefill."""
        self.handle = handle
        self.awaits = None
        self.prompt_logprobs = [TokenLogprob(*each) for each in handle.prompt_logprobs or ()]

    @property
    def draws_first_token(self) -> bool:
        """False when the first tokens came with a hand-off, or are to come with one."""
        return self.handle is None and self.awaits is None

    @property
    def scores_prompt(self) -> bool:
        return self.sampling.prompt_logprobs is not None and self.draws_first_token

    def open_choices(self) -> list[Choice]:
        """All choices, at the end of the prompt."""
        if not self.opened:
            self.opened = True
            self.choices += [Choice(self, index, list(self.prompt_ids)) for index in range(1, self.sampling.n)]
            for choice in self.choices:
                choice.begin()
        return self.choices

    def new_shaping(self) -> Shaping | None:
        """For a choice at the end of the prompt; None if nothing is done to its logits."""
        sampling = self.sampling
        repeats = sampling.repetition_penalty != 1
        penalised = repeats or sampling.presence_penalty != 0 or sampling.frequency_penalty != 0
        if not penalised and not sampling.logit_bias and self.grammar is None:
            return None
        bias = sampling.logit_bias
        return Shaping(
            bias=(np.array([*bias], np.int64), np.array([*bias.values()], np.float32)) if bias else None,
            counts=TokenCounts(self.prompt_ids if repeats else ()) if penalised else None,
            repetition=sampling.repetition_penalty,
            presence=sampling.presence_penalty,
            frequency=sampling.frequency_penalty,
        )

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
    _check_tokens(sampling, facts.vocab_size)
    if not 1 <= sampling.n <= capacity.max_batch_size:
        raise InvalidRequest(f"n: {sampling.n} is outside 1..{capacity.max_batch_size}", param="n")
    _check_precedence(submit)
    if submit.handle is not None:
        check_handle(submit, submit.handle, facts, capacity)
    request = Request(submit, arrival, facts, capacity)
    if request.blocks_needed > capacity.num_blocks:
        raise ContextLengthExceeded(
            f"{len(prompt)} prompt tokens with n = {sampling.n} and max_tokens = {request.max_new_tokens} need "
            f"{request.blocks_needed} KV blocks of {capacity.block_size} tokens, of {capacity.num_blocks} here.",
            param="prompt" if capacity.blocks(len(prompt)) > capacity.num_blocks else "max_tokens",
        )
    return request


def _check_precedence(submit: Submit) -> None:
    if not 0 <= submit.priority <= 1:
        raise InvalidRequest(f"priority: {submit.priority} is outside 0..1", param="priority")
    if submit.retention is None:
        return
    for priority in [submit.retention.decode_priority, *(span.priority for span in submit.retention.ranges)]:
        if not MIN_PRIORITY <= priority <= MAX_PRIORITY:
            raise InvalidRequest(
                f"kv_cache_retention_config: priority {priority} is outside {MIN_PRIORITY}..{MAX_PRIORITY}",
                param="kv_cache_retention_config",
            )


def _check_tokens(sampling: SamplingParams, vocab_size: int) -> None:
    """Token ids that index the logits."""
    named = {"logit_bias": sampling.logit_bias, "bad_words": (token for word in sampling.bad_words for token in word)}
    for param, tokens in named.items():
        wrong = next((token for token in tokens if not 0 <= token < vocab_size), None)
        if wrong is not None:
            raise InvalidRequest(f"{param}: token id {wrong} is outside 0..{vocab_size - 1}", param=param)
    if not all(sampling.bad_words):
        raise InvalidRequest("bad_words: a word without tokens", param="bad_words")


_STATE = "disaggregated_params.encoded_opaque_state"


def check_handle(submit: Submit, handle: Handle, facts: ModelFacts, capacity: Capacity) -> None:
    prompt = submit.prompt_ids
    if submit.handoff_id is not None:
        raise InvalidRequest("disaggregated_params: both context-only and generation-only", param=_STATE)
    if (reason := handle.mismatch(facts.fingerprint, facts.identity)) is not None:
        raise HandoffRefused(reason, param=_STATE)
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
