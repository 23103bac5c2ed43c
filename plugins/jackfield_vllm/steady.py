"""Scheduling while nothing but decoding happens: no sample comes, each gets one token, some end.

vLLM decides all of this anew for each sample and step, in Python; at a thousand samples that takes longer than the GPU needs for them.
Here a step that follows such a step is made from it. What a sample's state becomes is what vLLM would make of it, so that any step may be
vLLM's own again: when samples arrive or are dropped from the cache, when blocks run out, whenever anything else turns up.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np

VERSIONS = {(0, 24), (0, 32)}
"""Of vLLM's scheduler, those whose state this was written for and tested with; others do all by themselves."""


class Plain(NamedTuple):
    """What one step gave one sample, with the fields of vLLM's EngineCoreOutput that are read."""

    request_id: str
    new_token_ids: list[int]
    finish_reason: Any


class Flight(NamedTuple):
    """A step that was made here and has not come back."""

    scheduled: Any
    requests: list[Any]
    """vLLM's requests, one token each; the same list as in the step before while the same samples follow in the same order."""
    computed: np.ndarray
    """int64 [requests]: tokens computed before this step. Nobody writes to it."""
    fresh: list[int]
    """Positions in `requests` of those that got a block in this step."""
    stops: list[frozenset[int]]
    preempted: int


class Steady:
    """Takes the place of a scheduler's `schedule` and `update_from_output`."""

    def __init__(self, scheduler: Any) -> None:
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.core.sched.utils import check_stop, remove_all
        from vllm.v1.engine import EngineCoreOutputs
        from vllm.v1.request import RequestStatus

        self.scheduler, self.manager = scheduler, scheduler.kv_cache_manager
        self._running, self._check_stop, self._remove_all = RequestStatus.RUNNING, check_stop, remove_all
        self._outputs_of = EngineCoreOutputs
        self._size: int = self.manager.coordinator.single_type_managers[0].block_size
        self._ahead = isinstance(scheduler, AsyncScheduler)  # a step is scheduled before the last one's tokens are known
        self._active = scheduler._pause_state
        self._schedule, self._update, preempt = scheduler.schedule, scheduler.update_from_output, scheduler._preempt_request
        self._flights: dict[int, Flight] = {}
        self._last: Any = None
        self._preempted = 0

        def counted(*args: Any, **kwargs: Any) -> Any:
            self._preempted, self._last = self._preempted + 1, None
            return preempt(*args, **kwargs)

        scheduler.schedule, scheduler.update_from_output, scheduler._preempt_request = self.schedule, self.update, counted

    @staticmethod
    def suits(scheduler: Any, version: tuple[int, int]) -> bool:
        """Whether nothing is in use that this knows nothing of."""
        managers = getattr(scheduler.kv_cache_manager.coordinator, "single_type_managers", ())
        foreign = ("connector", "ec_connector", "lora_config", "use_pp", "use_v2_model_runner", "defer_block_free", "num_spec_tokens")
        foreign += ("needs_kv_cache_zeroing", "log_stats", "aux_output_connector", "enable_return_routed_experts", "return_sampling_mask")
        return (
            version in VERSIONS
            and [type(m).__name__ for m in managers] == ["FullAttentionManager"]
            and not any(getattr(scheduler, name, None) for name in foreign)
            and scheduler.policy.value == "fcfs"
            and not scheduler.num_lookahead_tokens
        )

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """A step made from the last one, or vLLM's own."""
        out = self._next()
        if out is None:
            out = self._schedule(*args, **kwargs)
            self._learn(out)
        return out

    def _queued(self) -> bool:
        return any(getattr(self.scheduler, name, None) for name in ("waiting", "skipped_waiting", "kv_holding_waiting"))

    def _ends(self, request: Any) -> bool:
        """Whether the tokens on their way are the sample's last, so that vLLM schedules it no more."""
        ahead, computed = request.num_output_placeholders, request.num_computed_tokens
        last = ahead > 0 and computed + 2 - ahead >= request.num_prompt_tokens + request.max_tokens
        return last or computed + 1 >= self.scheduler.max_model_len

    def _learn(self, out: Any) -> None:
        """Keep vLLM's step if the next one may be like it."""
        scheduler, cached, counts = self.scheduler, out.scheduled_cached_reqs, out.num_scheduled_tokens
        self._last = None
        plain = not (out.scheduled_new_reqs or cached.resumed_req_ids or out.scheduled_spec_decode_tokens or out.scheduled_encoder_inputs)
        if not plain or not counts or out.total_num_scheduled_tokens != len(counts) or out.preempted_req_ids or self._queued():
            return
        requests = [scheduler.requests[key] for key in cached.req_ids]
        held = [request for request in scheduler.running if request.request_id not in counts]
        if any(r.is_prefill_chunk or r.status is not self._running for r in requests) or not all(map(self._ends, held)):
            return
        self._last, self._held = out, held
        self._computed, self._outputs = (np.array(n, np.int64) + 1 for n in (cached.num_computed_tokens, cached.num_output_tokens))
        self._keep(requests)

    def _keep(self, requests: list[Any]) -> None:
        self._requests = requests
        self._keys = [request.request_id for request in requests]
        self._counts = dict.fromkeys(self._keys, 1)
        self._limits = np.array([r.num_prompt_tokens + r.max_tokens for r in requests]).clip(max=self.scheduler.max_model_len)
        settings = [request.sampling_params for request in requests]
        self._stops = [frozenset((*(s.stop_token_ids or ()), s.eos_token_id)) for s in settings]

    def _next(self) -> Any:
        """The step after the last one, or None where more happens than that tokens follow tokens."""
        scheduler = self.scheduler
        if self._last is None or self._queued() or scheduler._pause_state is not self._active:
            return None
        last = self._computed + 1 >= self._limits
        ended = bool(scheduler.finished_req_ids) or bool(last.any())
        if ended:
            self._held += [r for r, near in zip(self._requests, last, strict=True) if near and self._ends(r)]
            held = {r.request_id for r in self._held}
            stays = [r.status is self._running and r.request_id not in held for r in self._requests]
            if not all(stays):
                self._computed, self._outputs = self._computed[stays], self._outputs[stays]
                self._keep([r for r, yes in zip(self._requests, stays, strict=True) if yes])
            self._held = [r for r in self._held if r.status is self._running]
        inside = self._computed % self._size
        fresh = int((inside == 0).sum())
        if (
            not self._requests
            or len(scheduler.running) != len(self._requests) + len(self._held)
            or len(self._requests) > scheduler.max_num_scheduled_tokens
            or fresh > self.manager.block_pool.get_num_free_blocks()
        ):
            self._last = None
            return None
        return self._make(np.flatnonzero((inside == 0) | (inside == self._size - 1)).tolist())

    def _make(self, borders: list[int]) -> Any:
        scheduler, requests = self.scheduler, self._requests
        scheduler.current_step += 1
        self.manager.new_step_starts()
        blocks: list[Any] = [None] * len(requests)
        for i in borders:  # a block is taken before its first token, and can be found by its prefix from its last
            taken = self.manager.allocate_slots(requests[i], 1, num_lookahead_tokens=0)
            blocks[i] = taken.get_block_ids(allow_none=True)
        cached = dataclasses.replace(
            self._last.scheduled_cached_reqs,
            req_ids=self._keys,
            new_block_ids=blocks,
            num_computed_tokens=self._computed.tolist(),
            num_output_tokens=self._outputs.tolist(),
            all_token_ids={},
        )
        changed = {"scheduled_cached_reqs": cached, "num_scheduled_tokens": self._counts, "total_num_scheduled_tokens": len(requests)}
        if getattr(self._last, "num_common_prefix_blocks", None):
            changed["num_common_prefix_blocks"] = self.manager.get_num_common_prefix_blocks(scheduler.running[0].request_id)
        out = dataclasses.replace(self._last, **changed, finished_req_ids=scheduler.finished_req_ids)
        scheduler.finished_req_ids = set()
        if scheduler.prev_step_scheduled_req_ids != self._counts.keys():
            scheduler.prev_step_scheduled_req_ids.clear()
            scheduler.prev_step_scheduled_req_ids.update(self._counts)
        computed = self._computed
        self._computed, self._outputs = computed + 1, self._outputs + 1
        flying = hasattr(requests[0], "num_in_flight_tokens")
        for request in requests:
            request.num_computed_tokens += 1
            if self._ahead:
                request.num_output_placeholders += 1
            if flying:
                request.num_in_flight_tokens += 1
        fresh = [i for i in borders if blocks[i] is not None]
        self._flights[id(out)] = Flight(out, requests, computed, fresh, self._stops, self._preempted)
        return out

    def flight(self, scheduled: Any) -> Flight | None:
        """What is known of a step in flight beyond vLLM's own output for it; None for a step that vLLM scheduled itself."""
        return self._flights.get(id(scheduled))

    def update(self, scheduled: Any, output: Any) -> Any:
        """Hand out a step's tokens; vLLM does it for its own steps, and where a sample was dropped from the cache since."""
        flight = self._flights.pop(id(scheduled), None)
        foreign = ("pooler_output", "num_nans_in_logits", "kv_connector_output", "ec_connector_output")
        if flight is None or flight.preempted != self._preempted or any(getattr(output, name, None) for name in foreign):
            return self._update(scheduled, output)
        scheduler, size, ahead, longest = self.scheduler, self._size, self._ahead, self.scheduler.max_model_len
        tokens, rows, found, stopped = output.sampled_token_ids, output.req_id_to_index, [], set()
        flying = hasattr(flight.requests[0], "num_in_flight_tokens")
        for request, stops in zip(flight.requests, flight.stops, strict=True):
            if flying:
                request.num_in_flight_tokens -= 1
            if request.status is not self._running:  # it ended with the step before
                continue
            key = request.request_id
            (token,) = tokens[rows[key]]
            own, everything = request._output_token_ids, request._all_token_ids
            own.append(token)
            everything.append(token)
            length = len(everything)
            if length % size == 0:
                request.update_block_hashes()
            stop = (token in stops or length >= longest or len(own) >= request.max_tokens) and self._check_stop(request, longest)
            if ahead:
                request.num_output_placeholders -= 1
            reason = None
            if stop:
                reason = request.get_finished_reason()
                scheduler._handle_stopped_request(request)
                scheduler._free_request(request)
                stopped.add(request)
            found.append(Plain(key, [token], reason))
        if stopped:
            scheduler.running = self._remove_all(scheduler.running, stopped)
        return {0: self._outputs_of(outputs=found)}
