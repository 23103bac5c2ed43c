"""What is replaced in vLLM's decode step. With a thousand samples in flight the host bounds it, so each of these counts in microseconds."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from jackfield_vllm.sampling import Kind, SampleTable, draw_mixed, uniforms

_PLAIN: Kind = (1.0, 1.0, 0)


def keyed_sampler(runner: Any, table: SampleTable) -> nn.Module:
    """vLLM's sampler with its drawing replaced: seeds at no cost, log-probs of what was drawn, no noise of vocabulary size."""
    from vllm.v1.outputs import LogprobsTensors, SamplerOutput
    from vllm.v1.sample.sampler import Sampler

    class KeyedSampler(Sampler):
        known: tuple[int, list[str]] = (-1, [])

        def forward(self, logits: torch.Tensor, sampling_metadata: Any, *args: Any, **kwargs: Any) -> Any:
            batch = runner.input_batch
            keys = batch.req_ids
            if self.known != (table.added, keys):  # the same samples as in the step before, mostly
                self.known = table.added, list(keys)
                self.seeds = np.fromiter((table.seeds.get(k, 0) for k in keys), np.uint64, len(keys))
                self.kinds = [table.kinds.get(k, _PLAIN) for k in keys]
            uniform = torch.from_numpy(uniforms(self.seeds, batch.num_tokens_no_spec[: len(keys)]))
            if logits.is_cuda:
                uniform = uniform.pin_memory().to(logits.device, non_blocking=True)
            tokens, log_probs = draw_mixed(logits, self.kinds, uniform)
            ids = tokens.to(torch.int32)[:, None]
            return SamplerOutput(ids, LogprobsTensors(ids, log_probs[:, None], torch.zeros_like(ids[:, 0])))

    return KeyedSampler()


class LastStep:
    """What the runner gave for the step whose outputs were handed out last, log-probs among it: vLLM would cut three arrays a sample."""

    def __init__(self, scheduler: Any) -> None:
        self._output: Any = None
        update = scheduler.update_from_output

        def kept(scheduled: Any, output: Any) -> Any:
            self._output = output
            return update(scheduled, output)

        scheduler.update_from_output = kept

    def take(self) -> Any:
        """The runner's output for that step, once; None where no step was given since."""
        output, self._output = self._output, None
        return output


def log_probs(output: Any) -> np.ndarray:
    """float32 [rows of the batch], of the one token that each got; what a sample in the middle of its prompt has there means nothing."""
    return np.asarray(output.logprobs.logprobs)[:, 0]


def quick_slots(scheduler: Any) -> None:
    """Answer at once where a sample's next token fits into the block it has: fifteen of sixteen times, and a quarter of the host's work.

    Only for attention over everything in one group of layers: there a step inside a block takes none, gives none back and fills none
    that could be found by its prefix. The tokens before and after a border go vLLM's way.
    """
    manager = scheduler.kv_cache_manager
    single = getattr(manager.coordinator, "single_type_managers", ())
    if [type(m).__name__ for m in single] != ["FullAttentionManager"] or scheduler.num_lookahead_tokens:
        return
    nothing, allocate, size = manager.empty_kv_cache_blocks, manager.allocate_slots, single[0].block_size

    def slots(request: Any, num_new_tokens: int, *args: Any, **kwargs: Any) -> Any:
        if num_new_tokens == 1 and kwargs.keys() == {"num_lookahead_tokens"} and 0 < request.num_computed_tokens % size < size - 1:
            return nothing
        return allocate(request, num_new_tokens, *args, **kwargs)

    manager.allocate_slots = slots
