"""From a micro-batch to per-token outputs: the model's body on packed tokens, the head only where a token is scored."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from jackfield.batch import Batch
from jackfield.components import OutputRequest, Outputs
from jackfield_logits import log_probs_from_hidden, token_stats
from jackfield_reshard.modules import plain_head
from jackfield_torch.model import head_of
from jackfield_torch.packing import NAME, Layout, layout

_WORTH_PACKING = 0.9
"""Pack where it leaves at most this share of the padded tokens: gathering for attention costs about a tenth of a layer."""


class Scorer:
    """Runs one model. What the model allows is found out by trial at setup rather than from a list of architectures."""

    def __init__(self, model: Any, *, value: bool) -> None:
        self.model, self.value = model, value
        self.head = head_of(model)
        self.can_pack = self.plain_head = False
        self._probe()
        dropout = any(v for n, v in model.config.to_dict().items() if "drop" in n and isinstance(v, float))
        self.share_in_training = not dropout

    @torch.no_grad()
    def _probe(self) -> None:
        """Compare packed with padded on two tiny samples that share a beginning, and see what becomes of the head's output.

        The comparison runs in float32: in bfloat16 a deep model's rounding is as large as a wrong mask's effect.
        """
        device = self.head.weight.device
        training = self.model.training
        self.model.eval()
        tokens = torch.tensor([[1, 2, 3, 2], [1, 2, 1, 0]], device=device) % self.model.config.vocab_size
        self.plain_head = not self.value and plain_head(self.model, tokens)
        rows = torch.tensor([[0, 1, 2, 3], [0, 1, 4, 0]], device=device)
        source = torch.tensor([0, 1, 2, 3, 6], device=device)
        plan = Layout(tokens.flatten()[source][None], source[None] % 4, rows, source)
        own = self.model.config._attn_implementation
        try:
            with _widened(self.model.base_model):
                self.model.config._attn_implementation = own
                want = self.model.base_model(input_ids=tokens, use_cache=False).last_hidden_state
                self.model.config._attn_implementation = NAME
                got = self.model.base_model(input_ids=plan.tokens, position_ids=plan.positions, use_cache=False, jackfield_layout=plan)
            error = (got.last_hidden_state[0] - want.flatten(0, 1)[source]).abs().max()
            self.can_pack = bool(error <= 1e-3 * want.abs().max())
        except (ValueError, TypeError, RuntimeError, IndexError):  # its attention has features or a signature of its own
            self.can_pack = False
        if not self.can_pack:
            self.model.config._attn_implementation = own
        self.model.train(training)

    def _layout(self, batch: Batch, pack: bool | None) -> Layout:
        if self.can_pack and pack is not False:
            plan = layout(batch, pack=True, share=self.share_in_training or not self.model.training)
            if pack or plan.tokens.numel() <= _WORTH_PACKING * plan.rows.numel():
                return plan
        return layout(batch, pack=False, share=False)

    def __call__(self, batch: Batch, mask: Tensor, request: OutputRequest, *, pack: bool | None) -> Outputs:
        """Outputs [B, T] where `mask` (bool [B, T]; column 0 is ignored), 0 elsewhere. `pack` None: where it saves enough tokens."""
        plan = self._layout(batch, pack)
        body = self.model if not (self.plain_head or self.value) else self.model.base_model
        extra = {"jackfield_layout": plan} if self.can_pack else {}
        out = body(input_ids=plan.tokens, position_ids=plan.positions, use_cache=False, **extra)
        sample, token = mask[:, 1:].nonzero(as_tuple=True)
        at = plan.rows[sample, token]
        labels = batch.tokens[sample, token + 1]

        def spread(values: Tensor | None) -> Tensor | None:
            if values is None:
                return None
            return torch.zeros(mask.shape, device=values.device).index_put((sample, token + 1), values)

        if self.value:
            states = out.last_hidden_state.flatten(0, 1)[at]
            return Outputs(values=spread(F.linear(states.float(), self.head.weight.float())[:, 0]))
        if self.plain_head:
            states = out.last_hidden_state.flatten(0, 1)[at]
            found = log_probs_from_hidden(states, self.head.weight, labels, request, self.head.bias)
        else:
            found = token_stats(out.logits.flatten(0, 1)[at], labels, request)
        return Outputs(**{name: spread(value) for name, value in vars(found).items()})


@contextmanager
def _widened(model: nn.Module) -> Iterator[None]:
    """Compute in float32: each module widens its own weights for the time of its forward pass, so that no second model is held."""
    narrow: dict[nn.Module, list[tuple[nn.Parameter, Tensor]]] = {}

    def widen(module: nn.Module, inputs: Any) -> None:
        own = [p for p in module.parameters(recurse=False) if p.is_floating_point() and p.dtype != torch.float32]
        narrow[module] = [(p, p.data) for p in own]
        for p in own:
            p.data = p.data.float()

    def restore(module: nn.Module, inputs: Any, output: Any) -> None:
        for p, data in narrow.pop(module):
            p.data = data

    hooks = [m.register_forward_pre_hook(widen) for m in model.modules()]
    hooks += [m.register_forward_hook(restore, always_call=True) for m in model.modules()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
