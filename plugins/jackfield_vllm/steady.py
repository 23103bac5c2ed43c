"""Scheduling while nothing but decoding happens: no sample comes, each gets one token, some end.

vLLM decides all of this anew for each sample and step, in Python; at a thousand samples that takes longer than the GPU needs for them.
Here a step that follows such a step is made from it, in array operations over all samples: only a sample that ends, or takes a block, costs
Python of its own. What became of vLLM's requests is kept in a `Ledger` and written to them before vLLM reads them, so that any step
may be vLLM's own again: when samples arrive or are dropped from the cache, when blocks run out, whenever anything else turns up.
"""

from __future__ import annotations

import dataclasses
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from jackfield_vllm.ledger import Ledger
from jackfield_vllm.rows import rows_of

VERSIONS = {(0, 24), (0, 32)}
"""Of vLLM's scheduler, those whose state this was written for and tested with; others do all by themselves."""
FOREIGN = (
    *("connector", "ec_connector", "lora_config", "use_pp", "use_v2_model_runner", "defer_block_free", "num_spec_tokens", "log_stats"),
    *("needs_kv_cache_zeroing", "aux_output_connector", "enable_return_routed_experts", "return_sampling_mask"),
    *("enable_kv_cache_events", "kv_metrics_collector"),
)
"""What a scheduler may do that this knows nothing of, by vLLM's names."""


class Members(NamedTuple):
    """The samples of a step, in its order; nothing in here changes once it is made."""

    requests: list[Any]
    keys: list[str]
    counts: dict[str, int]
    """One token for each key."""
    limits: np.ndarray
    """int64 [requests]: tokens, prompt included, at which each ends."""
    stops: np.ndarray
    """int64 [requests]: which set of stop tokens each has, in the upper half of the number."""
    rows: np.ndarray
    """int64 [requests]: rows of the ledger."""
    serials: np.ndarray
    """int64 [requests]: serial numbers of those rows; a row that has another by now is not the request's any more."""
    before: tuple[list[str], np.ndarray] | tuple[None, None] = (None, None)
    """Keys of the members that these are a part of, and bool [those keys]: which part."""


class Flight(NamedTuple):
    """A step that was made here and has not come back."""

    scheduled: Any
    members: Members
    computed: np.ndarray
    """int64 [requests]: tokens computed before this step. Nobody writes to it."""
    fresh: list[int]
    """Positions in `requests` of those that got a block in this step."""
    preempted: int

    @property
    def requests(self) -> list[Any]:
        """vLLM's requests, one token each; the same list as in the step before while the same samples follow in the same order. What they
        say of themselves may be some steps old."""
        return self.members.requests


class Tokens(NamedTuple):
    """What a step that was made here gave its samples; stands where vLLM has a list with an output for each."""

    keys: list[str]
    """The same list as in the step before while the same samples follow in the same order."""
    before: tuple[list[str], np.ndarray] | tuple[None, None]
    """As in Members."""
    rows: np.ndarray
    """int64 [keys]: the row of the runner's output that is each one's."""
    alive: np.ndarray
    """bool [keys]: false for one that had ended before."""
    tokens: np.ndarray
    """int64 [keys]."""
    ended: list[tuple[Any, Any]]
    """Those that ended with this token, and vLLM's finish reasons."""


class Steady:
    """Takes the place of a scheduler's `schedule` and `update_from_output`."""

    def __init__(self, scheduler: Any) -> None:
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.core.sched.utils import check_stop, remove_all
        from vllm.v1.engine import EngineCoreOutputs
        from vllm.v1.request import RequestStatus

        self.scheduler, self.manager = scheduler, scheduler.kv_cache_manager
        self._running, self._check_stop, self._remove_all = RequestStatus.RUNNING, check_stop, remove_all
        self._outputs_of: Any = EngineCoreOutputs
        (self._blocks,) = self.manager.coordinator.single_type_managers
        self._size: int = self._blocks.block_size
        self.ledger = Ledger(self.manager, ahead=isinstance(scheduler, AsyncScheduler))
        self._active = scheduler._pause_state
        self._schedule, self._update = scheduler.schedule, scheduler.update_from_output
        self._flights: dict[int, Flight] = {}
        self._last: Any = None
        self._preempted = 0
        self._sets: dict[frozenset[int], int] = {}
        self._stops = np.array([2**62])
        self._order: tuple[Any, list[str], np.ndarray] = (None, [], np.zeros(0, np.int64))
        preempt, free = scheduler._preempt_request, scheduler._free_request

        def preempted(request: Any, *args: Any, **kwargs: Any) -> Any:
            self._preempted, self._last = self._preempted + 1, None
            self.ledger.settle(request)
            return preempt(request, *args, **kwargs)

        def freed(request: Any, *args: Any, **kwargs: Any) -> Any:
            self.ledger.close(request)
            return free(request, *args, **kwargs)

        scheduler.schedule, scheduler.update_from_output = self.schedule, self.update
        scheduler._preempt_request, scheduler._free_request = preempted, freed

    @staticmethod
    def suits(scheduler: Any, version: tuple[int, int]) -> bool:
        """Whether nothing is in use that this knows nothing of."""
        managers = getattr(scheduler.kv_cache_manager.coordinator, "single_type_managers", ())
        return (
            version in VERSIONS
            and [type(m).__name__ for m in managers] == ["FullAttentionManager"]
            and not any(getattr(scheduler, name, None) for name in FOREIGN)
            and scheduler.policy.value == "fcfs"
            and not scheduler.num_lookahead_tokens
        )

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """A step made from the last one, or vLLM's own."""
        out = self._next()
        if out is None:
            self.ledger.settle_all()
            out = self._schedule(*args, **kwargs)
            self._learn(out)
        return out

    def _admits(self) -> bool:
        """Whether a sample could come: one waits, and not all that may run at once do."""
        scheduler = self.scheduler
        waits = any(getattr(scheduler, name, None) for name in ("waiting", "skipped_waiting", "kv_holding_waiting"))
        return waits and len(scheduler.running) < getattr(scheduler, "max_num_active_reqs", scheduler.max_num_running_reqs)

    def _ends(self, request: Any) -> bool:
        """Whether the tokens on their way are the sample's last, so that vLLM schedules it no more."""
        self.ledger.settle(request)
        ahead, computed = request.num_output_placeholders, request.num_computed_tokens
        last = ahead > 0 and computed + 2 - ahead >= request.num_prompt_tokens + request.max_tokens
        return bool(last or computed + 1 >= self.scheduler.max_model_len)

    def _learn(self, out: Any) -> None:
        """Keep vLLM's step if the next one may be like it."""
        scheduler, cached, counts = self.scheduler, out.scheduled_cached_reqs, out.num_scheduled_tokens
        self._last = None
        plain = not (out.scheduled_new_reqs or cached.resumed_req_ids or out.scheduled_spec_decode_tokens or out.scheduled_encoder_inputs)
        if not plain or not counts or out.total_num_scheduled_tokens != len(counts) or out.preempted_req_ids or self._admits():
            return
        requests = [scheduler.requests[key] for key in cached.req_ids]
        held = [request for request in scheduler.running if request.request_id not in counts]
        if any(r.is_prefill_chunk or r.status is not self._running for r in requests) or not all(map(self._ends, held)):
            return
        self._last, self._held = out, held
        self._computed, self._outputs = (np.array(n, np.int64) + 1 for n in (cached.num_computed_tokens, cached.num_output_tokens))
        limits = np.array([r.num_prompt_tokens + r.max_tokens for r in requests]).clip(max=scheduler.max_model_len)
        stops = np.array([self._stop_set(r.sampling_params) for r in requests]) << 32
        rows = self.ledger.open(requests)
        self._members = Members(requests, list(cached.req_ids), dict(counts), limits, stops, rows, self.ledger.serials[rows])

    def _stop_set(self, settings: Any) -> int:
        tokens = frozenset((*(settings.stop_token_ids or ()), settings.eos_token_id)) - {None}
        if tokens not in self._sets:
            number = self._sets[tokens] = len(self._sets)
            self._stops = np.sort([*self._stops, *((number << 32) + token for token in tokens)])
        return self._sets[tokens]

    def _leave(self, stays: np.ndarray) -> None:
        """Go on without some of the members."""
        old = self._members
        requests, keys, counts = old.requests.copy(), old.keys.copy(), old.counts.copy()
        for i in np.flatnonzero(~stays)[::-1].tolist():
            key = keys.pop(i)
            del requests[i], counts[key]
            self.scheduler.prev_step_scheduled_req_ids.discard(key)
        limits, stops, rows, serials = (array[stays] for array in (old.limits, old.stops, old.rows, old.serials))
        self._members = Members(requests, keys, counts, limits, stops, rows, serials, (old.keys, stays))
        self._computed, self._outputs = self._computed[stays], self._outputs[stays]

    def _next(self) -> Any:
        """The step after the last one, or None where more happens than that tokens follow tokens."""
        scheduler = self.scheduler
        if self._last is None or self._admits() or scheduler._pause_state is not self._active:
            return None
        near = self._computed + 1 >= self._members.limits
        if scheduler.finished_req_ids or near.any():
            stays = self.ledger.serials[self._members.rows] == self._members.serials
            for i in np.flatnonzero(near & stays).tolist():
                request = self._members.requests[i]
                if self._ends(request):
                    self._held.append(request)
                    stays[i] = False
            if not stays.all():
                self._leave(stays)
            self._held = [r for r in self._held if r.status is self._running]
        members = self._members
        fresh = np.flatnonzero(self._computed % self._size == 0).tolist()
        if (
            not members.requests
            or len(scheduler.running) != len(members.requests) + len(self._held)
            or len(members.requests) > scheduler.max_num_scheduled_tokens
            or len(fresh) > self.manager.block_pool.get_num_free_blocks()
        ):
            self._last = None
            return None
        return self._make(fresh)

    def _make(self, fresh: list[int]) -> Any:
        scheduler, members, computed = self.scheduler, self._members, self._computed
        scheduler.current_step += 1
        self.manager.new_step_starts()
        blocks: list[Any] = [None] * len(members.keys)
        for i, block in zip(fresh, self.manager.block_pool.get_new_blocks(len(fresh)), strict=True):
            self._blocks.req_to_blocks[members.keys[i]].append(block)
            blocks[i] = ([block.block_id],)
        cached = dataclasses.replace(
            self._last.scheduled_cached_reqs,
            req_ids=members.keys,
            new_block_ids=blocks,
            num_computed_tokens=computed.tolist(),
            num_output_tokens=self._outputs.tolist(),
            all_token_ids={},
        )
        changed = {"scheduled_cached_reqs": cached, "num_scheduled_tokens": members.counts, "total_num_scheduled_tokens": len(members.keys)}
        if getattr(self._last, "num_common_prefix_blocks", None):
            changed["num_common_prefix_blocks"] = self.manager.get_num_common_prefix_blocks(scheduler.running[0].request_id)
        out = dataclasses.replace(self._last, **changed, finished_req_ids=scheduler.finished_req_ids)
        scheduler.finished_req_ids = set()
        self._computed, self._outputs = computed + 1, self._outputs + 1
        self.ledger.made(members.rows)
        self._flights[id(out)] = Flight(out, members, computed, fresh, self._preempted)
        return out

    def flight(self, scheduled: Any) -> Flight | None:
        """What is known of a step in flight beyond vLLM's own output for it; None for a step that vLLM scheduled itself."""
        return self._flights.get(id(scheduled))

    def update(self, scheduled: Any, output: Any) -> Any:
        """Take a step's tokens (`Tokens`); vLLM does it for its own steps, and where a sample was dropped from the cache since."""
        flight = self._flights.pop(id(scheduled), None)
        foreign = ("pooler_output", "num_nans_in_logits", "kv_connector_output", "ec_connector_output")
        if flight is None or flight.preempted != self._preempted or any(getattr(output, name, None) for name in foreign):
            self.ledger.settle_all()
            return self._update(scheduled, output)
        members, order = flight.members, self._rows(flight.members, output)
        sampled = output.sampled_token_ids
        tokens = np.fromiter(chain.from_iterable(sampled), np.int64, len(sampled))[order]
        alive = self.ledger.serials[members.rows] == members.serials
        if alive.all():
            self.ledger.back(members.rows, tokens)
        else:  # some ended with the step before
            self.ledger.back(members.rows[alive], tokens[alive])
        wanted = members.stops + tokens
        stop = (flight.computed + 2 >= members.limits) | (self._stops[np.searchsorted(self._stops, wanted)] == wanted)
        ended = self._end([members.requests[i] for i in np.flatnonzero(stop & alive).tolist()])
        self.ledger.turn()
        return {0: self._outputs_of(outputs=Tokens(members.keys, members.before, order, alive, tokens, ended))}

    def _rows(self, members: Members, output: Any) -> np.ndarray:
        """Rows of the runner's output by member; mostly as in the step before."""
        known, ids, rows = self._order
        if known is not members or ids != output.req_ids:
            rows = rows_of(output.req_id_to_index, members.keys)
            self._order = members, list(output.req_ids), rows
        return rows

    def _end(self, requests: list[Any]) -> list[tuple[Any, Any]]:
        """Let vLLM conclude these, in their order; each with its finish reason."""
        ended = []
        for request in requests:
            self.ledger.settle(request)
            if self._check_stop(request, self.scheduler.max_model_len):
                ended.append((request, request.get_finished_reason()))
                self.scheduler._handle_stopped_request(request)
                self.scheduler._free_request(request)
        if ended:
            self.scheduler.running = self._remove_all(self.scheduler.running, {request for request, _ in ended})
        return ended
