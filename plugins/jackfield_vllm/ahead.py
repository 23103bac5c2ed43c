"""The model runner's part of a step that was made by `steady`: what is as in the step before is not made again.

Between two such steps, of the same samples, the tokens move on by one; that is all. vLLM prepares each from nothing, in Python that
runs once for every sample, and copies a dozen arrays to the GPU. Here the arrays on the GPU count on by themselves. Whatever else
happens (a sample leaves, takes a block, comes) vLLM does, for those samples alone.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from jackfield_vllm.rows import rows_of

if TYPE_CHECKING:
    from jackfield_vllm.steady import Flight, Steady

VERSIONS = {(0, 24), (0, 32)}
"""Of vLLM's model runner, those whose state this was written for and tested with; others do all by themselves."""
FOREIGN = (
    *("speculative_config", "lora_config", "uses_mrope", "uses_xdrope_dim", "enable_prompt_embeds", "is_pooling_model"),
    *("num_accepted_tokens_event", "mamba_prev_last_scheduled_idx", "routed_experts_initialized", "broadcast_pp_output"),
)
"""What a runner may do that this knows nothing of, by vLLM's names."""


class Ahead:
    """Takes the place of four methods of a runner that starts a step before the tokens of the last are known."""

    def __init__(self, runner: Any, steady: Steady) -> None:
        self.runner, self.steady = runner, steady
        self._update, self._prepare = runner._update_states, runner._prepare_inputs
        self._ids, self._book = runner._prepare_input_ids, runner._bookkeeping_sync
        self._members: list[Any] | None = None
        self._rows = np.zeros(0, np.int64)
        self._prepared: Any = None
        runner._update_states, runner._prepare_inputs = self.update_states, self.prepare_inputs
        runner._prepare_input_ids, runner._bookkeeping_sync = self.prepare_input_ids, self.bookkeeping

    @staticmethod
    def suits(runner: Any, version: tuple[int, int]) -> bool:
        """Whether the runner does nothing that this knows nothing of."""
        return (
            version in VERSIONS
            and runner.use_async_scheduling
            and runner.parallel_config.pipeline_parallel_size == 1
            and runner.dcp_world_size == 1
            and not any(getattr(runner, name, None) for name in FOREIGN)
        )

    def update_states(self, out: Any) -> Any:
        """vLLM's own for who left and who got a block; the others have one token more."""
        flight = self.steady.flight(out)
        if flight is None:
            self._members = None
            return self._update(out)
        batch = self.runner.input_batch
        if flight.requests is not self._members or flight.fresh or out.finished_req_ids:
            self._update(dataclasses.replace(out, scheduled_cached_reqs=_some(out.scheduled_cached_reqs, flight.fresh)))
        if flight.requests is not self._members:
            self._members, self._prepared = flight.requests, None
            keys, states = out.scheduled_cached_reqs.req_ids, self.runner.requests
            self._rows = rows_of(batch.req_id_to_index, keys)
            self._tokens = [states[key].output_token_ids for key in keys]
        batch.num_computed_tokens_cpu[self._rows] = flight.computed
        return None

    def prepare_inputs(self, out: Any, *args: Any) -> Any:
        """Count on where the last step was of the same samples in the same rows."""
        flight = self.steady.flight(out)
        if flight is None:
            return self._prepare(out, *args)
        if self._prepared is None:
            self._prepared = self._prepare(out, *args)
        else:
            self._count_on(flight)
        return self._prepared

    def _count_on(self, flight: Flight) -> None:
        runner, batch, n = self.runner, self.runner.input_batch, len(flight.requests)
        if flight.fresh:
            batch.block_table.commit_block_table(n)
        positions = runner.positions[:n]
        for counted in (positions, runner.num_computed_tokens[:n], runner.seq_lens[:n], runner.optimistic_seq_lens_cpu[:n]):
            counted += 1
        batch.block_table.compute_slot_mapping(n, runner.query_start_loc.gpu[: n + 1], positions)
        runner.input_ids.gpu[:n].copy_(batch.prev_sampled_token_ids[:, 0])  # row by row the same samples

    def prepare_input_ids(self, out: Any, num_reqs: int, *args: Any) -> None:
        """Each sample's token of the step before, from the row that it had there."""
        if self.steady.flight(out) is None:
            self._ids(out, num_reqs, *args)
            return
        before = self.runner.prev_positions.copy_to_gpu(num_reqs)
        torch.index_select(self.runner.input_batch.prev_sampled_token_ids[:, 0], 0, before, out=self.runner.input_ids.gpu[:num_reqs])

    def bookkeeping(self, out: Any, sampled: Any, *args: Any) -> Any:
        """vLLM's own as if there were no tokens; they are all entered at once."""
        if self.steady.flight(out) is None:
            return self._book(out, sampled, *args)
        batch, rows = self.runner.input_batch, self._rows
        found = self._book(out, dataclasses.replace(sampled, sampled_token_ids=sampled.sampled_token_ids[:0]), *args)
        batch.prev_sampled_token_ids = sampled.sampled_token_ids
        at = batch.num_tokens_no_spec[rows]
        batch.token_ids_cpu[rows, at] = -1  # a place for a token that is still on its way
        batch.is_token_ids[rows, at] = True
        batch.num_tokens_no_spec[rows] = at + 1
        for tokens in self._tokens:
            tokens.append(-1)
        return found


def _some(cached: Any, chosen: list[int]) -> Any:
    """vLLM's data of these samples alone."""
    names = ("req_ids", "new_block_ids", "num_computed_tokens", "num_output_tokens")
    return dataclasses.replace(cached, **{name: [getattr(cached, name)[i] for i in chosen] for name in names})
