"""The table of workers: who can serve, who can hand over to whom, and the choice of one for a leg.

All changes are synchronous and recompute the candidate lists, so that a request only indexes into tuples.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from kvstore.errors import NotReady
from kvstore.protocol import Fingerprint, ServerInfo, ServerRole, WorkerRecord
from router.admission import Admission
from router.config import DisaggConfig
from router.index import BlockIndex
from router.policy import Need, Policy, PrefixAware, make_policy
from router.worker import Worker, WorkerState

logger = logging.getLogger(__name__)

RETRY_AFTER = 1.0  # seconds, for clients that came before there was a pair of workers
MOST_FAILURES = 5  # of requests to a worker, one after another: then it gets none for a while
TRIP_SECONDS, LONGEST_TRIP = 2.0, 60.0  # doubled with each failed trial


class Cluster:
    """`contexts` are the context workers that have a partner; `partners` the generation workers of each."""

    def __init__(self, config: DisaggConfig) -> None:
        self.config = config
        self.index = BlockIndex()
        self.context_policy: Policy = make_policy(config.context.router, self.index)
        self.generation_policy: Policy = make_policy(config.generation.router, self.index)
        self.policies = {ServerRole.CONTEXT: self.context_policy, ServerRole.GENERATION: self.generation_policy}
        self.room = Admission(config.admission, self.context_policy, self.generation_policy)
        self.workers: list[Worker] = []
        self.contexts: tuple[Worker, ...] = ()
        self.generations: tuple[Worker, ...] = ()
        self.partners: dict[Worker, tuple[Worker, ...]] = {}
        self.ready = False
        self.registry_state: str | None = None
        self.tokens_per_block: int | None = None
        self.tokenizer_problem: str | None = None
        self.accepted_models: frozenset[bytes] | None = None  # as JSON texts; None: some worker does not tell

    def __repr__(self) -> str:
        return f"<Cluster ready={self.ready} {self.workers}>"

    # ------------------------------------------------------------ choosing

    def pick_context(self, need: Need, excluded: Sequence[Worker] = ()) -> Worker:
        """Reserve a context worker. NotReady when none can serve now."""
        candidates = self.contexts if self.ready else ()
        if excluded:
            candidates = self._contexts_without(excluded)
        if not candidates:
            raise self._not_ready()
        return self._try(self.context_policy.pick(candidates, need))

    def pick_generation(self, context: Worker, need: Need, excluded: Sequence[Worker] = ()) -> Worker:
        """Reserve a generation worker that can take over from `context`. NotReady when none can now."""
        candidates = self.partners.get(context)
        if candidates is None:  # it left after its leg was sent: what it has prefilled is still there to be fetched
            candidates = tuple(worker for worker in self.generations if worker.fingerprint == context.fingerprint)
        if excluded:
            candidates = tuple(worker for worker in candidates if worker not in excluded)
        if not candidates:
            raise self._not_ready()
        return self._try(self.generation_policy.pick(candidates, need))

    def pick_local(self, need: Need, excluded: Sequence[Worker] = ()) -> Worker:
        """Reserve the generation worker that would serve this request best on its own. NotReady when there is none."""
        candidates = tuple(worker for worker in self.generations if worker not in excluded) if self.ready else ()
        if not candidates:
            raise self._not_ready()
        return self._try(self.generation_policy.pick(candidates, need))

    def release(self, worker: Worker, need: Need) -> None:
        """The leg is over, however it went."""
        self.policies[worker.role].release(worker, need)
        self.room.changed()

    def _try(self, worker: Worker) -> Worker:
        """A worker on trial gets one request, and no other before that is answered."""
        if worker.state is WorkerState.TRIAL:
            self.set_state(worker, WorkerState.TRIPPED, "its trial is under way")
        return worker

    def others_left(self, excluded: Sequence[Worker]) -> bool:
        """Whether another attempt has a pair of workers without those."""
        return self.ready and bool(self._contexts_without(excluded))

    def _contexts_without(self, excluded: Sequence[Worker]) -> tuple[Worker, ...]:
        return tuple(
            worker
            for worker in self.contexts
            if worker not in excluded and any(partner not in excluded for partner in self.partners[worker])
        )

    def _not_ready(self) -> NotReady:
        return NotReady(self.why_not_ready() or "no worker is left to take this request", retry_after=RETRY_AFTER)

    # ------------------------------------------------------------ changes

    def add(self, worker: Worker) -> None:
        self.workers.append(worker)
        self._recompute()

    def remove(self, worker: Worker) -> None:
        self._purge(worker)
        worker.pool.close()
        self.workers.remove(worker)
        self.policies[worker.role].forget(worker)
        self._recompute()

    def describe_worker(self, worker: Worker, info: ServerInfo, models: list[str]) -> None:
        """What a worker says about itself. Another incarnation than before takes its index entries along."""
        if info.incarnation != worker.incarnation or worker.blocks is None:
            self._purge(worker)
            worker.incarnation = info.incarnation
            if info.incarnation is not None:
                worker.blocks = self.index.attach(info.incarnation, worker)
        worker.info, worker.models = info, models
        worker.releases = info.engine == "trtllm-disagg"
        self._adopt_block_size(worker)
        self._recompute()

    def set_state(self, worker: Worker, state: WorkerState, reason: str = "") -> None:
        if worker.state is state or worker.state is WorkerState.LEAVING:
            return
        log = logger.info if state is WorkerState.READY else logger.warning
        log("%s worker %s is %s%s", worker.role_name, worker.address, state, f": {reason}" if reason else "")
        worker.state, worker.state_reason = state, reason
        self._recompute()

    def suspect(self, worker: Worker, reason: str, unreachable: bool) -> None:
        """A leg failed. An unreachable worker gets nothing until it answers a probe; any other is probed now."""
        if unreachable and worker.state is WorkerState.READY:
            self.set_state(worker, WorkerState.DOWN, reason)
        worker.probe_now.set()

    def worked(self, worker: Worker) -> None:
        """A leg was answered."""
        worker.failures = worker.trips = 0
        if worker.state is WorkerState.TRIPPED:
            self.set_state(worker, WorkerState.READY)

    def failed(self, worker: Worker, reason: str) -> None:
        """A leg came to nothing for a cause in the worker. Enough of these, or one in a trial, trip it."""
        worker.failures += 1
        on_trial = worker.state is WorkerState.TRIPPED
        if worker.failures < MOST_FAILURES or not (worker.state is WorkerState.READY or on_trial):
            return
        pause = min(TRIP_SECONDS * 2**worker.trips, LONGEST_TRIP)
        worker.trips += 1
        worker.tripped_until = time.monotonic() + pause
        why = f"{worker.failures} requests failed one after another, the last: {reason}; next one in {pause:g} s"
        worker.state_reason = why
        self.set_state(worker, WorkerState.TRIPPED, why)

    def answers_probe(self, worker: Worker) -> None:
        """It says that it serves. A tripped one has to show it, when its time has come."""
        if worker.state is not WorkerState.TRIPPED:
            if worker.state is not WorkerState.TRIAL:
                self.set_state(worker, WorkerState.READY)
        elif not worker.active and time.monotonic() >= worker.tripped_until:
            self.set_state(worker, WorkerState.TRIAL, "the next request is its trial")

    def _purge(self, worker: Worker) -> None:
        if worker.blocks is not None:
            self.index.detach(worker.blocks)
            worker.blocks = None

    def _adopt_block_size(self, worker: Worker) -> None:
        size = worker.info.tokens_per_block
        if size is None:
            return
        if self.tokens_per_block is None or self.tokens_per_block == size or len(self.workers) == 1:
            self.tokens_per_block = size

    def _recompute(self) -> None:
        usable = [worker for worker in self.workers if worker.usable]
        contexts = [worker for worker in usable if worker.role is ServerRole.CONTEXT]
        generations = [worker for worker in usable if worker.role is ServerRole.GENERATION]
        alike: dict[Fingerprint | None, list[Worker]] = {}
        for worker in generations:
            alike.setdefault(worker.fingerprint, []).append(worker)
        partners = {context: tuple(alike.get(context.fingerprint, ())) for context in contexts}
        self.partners = {context: workers for context, workers in partners.items() if workers}
        self.contexts = tuple(self.partners)
        self.generations = tuple(generations)
        self.room.set_limits(contexts, generations)
        self.accepted_models = _accepted_models(usable)
        minimum = self.config.cluster
        enough = minimum is None or (
            len(contexts) >= minimum.minimal_context and len(generations) >= minimum.minimal_generation
        )
        ready = bool(self.contexts) and enough
        if ready != self.ready:
            log = logger.info if ready else logger.warning
            log("the cluster is %s", "ready" if ready else f"not ready: {self.why_not_ready()}")
        self.ready = ready

    # ------------------------------------------------------------ views

    def by_role(self, role: ServerRole) -> list[Worker]:
        return [worker for worker in self.workers if worker.role is role]

    def why_not_ready(self) -> str | None:
        """None when a request would be served."""
        missing = []
        for role, minimum in (
            (ServerRole.CONTEXT, self.config.cluster.minimal_context if self.config.cluster else 1),
            (ServerRole.GENERATION, self.config.cluster.minimal_generation if self.config.cluster else 1),
        ):
            up = sum(worker.usable for worker in self.by_role(role))
            if up < max(1, minimum):
                missing.append(f"{up} of {max(1, minimum)} {role.name.lower()} workers")
        if missing:
            return f"the cluster has {' and '.join(missing)}"
        return None if self.contexts else "no context worker can hand over to a generation worker"

    def mismatches(self) -> list[dict[str, Any]]:
        """Pairs that cannot hand over, with the values that differ."""
        return [
            {"context": context.address, "generation": generation.address, "differences": differences}
            for context in self.by_role(ServerRole.CONTEXT)
            for generation in self.by_role(ServerRole.GENERATION)
            if WorkerState.JOINING not in (context.state, generation.state)
            and (differences := fingerprint_differences(context, generation))
        ]

    def degraded(self) -> list[str]:
        """Why the cluster serves worse than configured; empty when it does not."""
        reasons = []
        if self.registry_state is not None and self.registry_state != "up":
            reasons.append(f"registry {self.registry_state}")
        if self.tokenizer_problem is not None and any(policy.needs_tokens for policy in self.policies.values()):
            reasons.append(f"prompts are not tokenized, load alone decides: {self.tokenizer_problem}")
        for worker in self.workers:
            if worker.state is WorkerState.DOWN:
                reasons.append(f"{worker.role_name} worker {worker.address} is down: {worker.state_reason}")
            if self.wants_events(worker) and worker.usable and worker.events_state != "live":
                reasons.append(f"{worker.role_name} worker {worker.address}: no KV events ({worker.events_state})")
            size = worker.info.tokens_per_block
            if self.wants_events(worker) and size not in (None, self.tokens_per_block):
                reasons.append(
                    f"{worker.role_name} worker {worker.address} has blocks of {size} tokens, prompts are hashed in "
                    f"blocks of {self.tokens_per_block}: its cache is never matched"
                )
        for pair in self.mismatches():
            reasons.append(
                f"{pair['context']} cannot hand over to {pair['generation']}: {'; '.join(pair['differences'])}"
            )
        return reasons

    def wants_events(self, worker: Worker) -> bool:
        return isinstance(self.policies[worker.role], PrefixAware)

    def models(self) -> list[str]:
        """Served model names, sorted: of the usable workers."""
        return sorted({name for worker in self.workers if worker.usable for name in worker.models})


def _accepted_models(usable: Sequence[Worker]) -> frozenset[bytes] | None:
    names: set[bytes] = set()
    for worker in usable:
        if worker.info.accepts is None:
            return None
        names.update(map(msgspec.json.encode, worker.info.accepts))
    return frozenset(names) if usable else None


def fingerprint_differences(context: Worker, generation: Worker) -> list[str]:
    """Empty for a pair that can hand over. Workers of other makes tell no fingerprint: two such are taken to match."""
    ours, theirs = context.fingerprint, generation.fingerprint
    if ours == theirs:
        return []
    if ours is None or theirs is None:
        return [f"fingerprint: {(context if ours is None else generation).address} tells none"]
    return ours.differences(theirs)


def record_of(worker: Worker) -> dict[str, Any]:
    """The four fields of a registry record."""
    return {"worker_id": worker.worker_id, "host": worker.host, "port": worker.port, "role": int(worker.role)}


def records_by_id(records: Iterable[WorkerRecord]) -> dict[str, WorkerRecord]:
    """Only the roles that this router drives."""
    roles = (int(ServerRole.CONTEXT), int(ServerRole.GENERATION))
    return {record.worker_id: record for record in records if record.role in roles}
