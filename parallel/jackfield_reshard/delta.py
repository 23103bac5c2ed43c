"""Transport `delta`: sends only the elements that changed since the last version; for engines on processes of their own.

After a step with a small learning rate most bfloat16 weights are bit for bit what they were. The sender keeps what it sent last, in
the type that travels, and sends for each box whichever is shortest: nothing, (index, value) pairs, a bit mask with values, or all
elements. The receiver writes them into its own weights. Every box carries a checksum of what it must be afterwards; where it
differs (an engine that started anew, or was written by somebody else) the box is sent again whole, so the result is always exact.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from jackfield.shard import Shard, SyncReport
from jackfield_reshard.checksum import bits, checksum
from jackfield_reshard.transports import Resharding, phase
from jackfield_reshard.wire import Item, Wire, buckets, by_peer, wire_types

DENSE, MASK, PAIRS = 0, 1, 2


def encode(now: Tensor, before: Tensor | None) -> tuple[int, int, Tensor]:
    """(form, changed elements, payload as uint8) of a flat tensor against what the receiver has; a NaN counts by its bits."""
    if before is None:
        return DENSE, now.numel(), now.view(torch.uint8)
    changed = bits(now) != bits(before)
    count, size = int(changed.sum()), now.element_size()
    lengths = {PAIRS: count * (4 + size), MASK: -(-now.numel() // 8) + count * size, DENSE: now.numel() * size}
    form = min(lengths, key=lambda f: lengths[f])
    if form == DENSE:
        return DENSE, now.numel(), now.view(torch.uint8)
    values = now[changed].view(torch.uint8)
    if form == PAIRS:
        index = changed.nonzero().view(-1).to(torch.int32).view(torch.uint8)
        return PAIRS, count, torch.cat([index, values])
    padded = torch.nn.functional.pad(changed, (0, -now.numel() % 8)).view(-1, 8)
    weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=now.device)
    return MASK, count, torch.cat([(padded * weights).sum(1).to(torch.uint8), values])


def decode(form: int, count: int, payload: Tensor, into: Tensor) -> None:
    """Write an encoded change into a flat tensor, in place."""
    if form == DENSE:
        into.copy_(payload.clone().view(into.dtype))
        return
    if form == PAIRS:
        index = payload[: 4 * count].clone().view(torch.int32).long()
        into[index] = payload[4 * count :].clone().view(into.dtype)
        return
    length = -(-into.numel() // 8)
    weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=into.device)
    changed = (payload[:length, None] & weights).ne(0).view(-1)[: into.numel()]
    into[changed] = payload[length:].clone().view(into.dtype)


class Delta(Resharding):
    """Sends changes only; keeps one more copy of what a rank sends, on its device."""

    wired = ()

    def _compile(self, have: Sequence[Shard], need: Sequence[Shard]) -> None:
        super()._compile(have, need)
        types = wire_types(self.agreement)
        capacity = Wire.capacity_of(self.agreement, self.config.bucket_bytes)
        sends, receives = by_peer(self.agreement)
        self._out = {peer: [items for items, _ in buckets(moves, types, capacity)] for peer, moves in sends.items()}
        self._into = {peer: [items for items, _ in buckets(moves, types, capacity)] for peer, moves in receives.items()}
        self._rounds = max((len(b) for b in (*self._out.values(), *self._into.values())), default=0)
        self._sent: dict[tuple[int, int, int], Tensor] = getattr(self, "_sent", {})

    def _flat(self, item: Item) -> Tensor:
        view = self.agreement.origin(item.name, item.box).view(self._views[0])
        return view.detach().to(item.dtype).contiguous().view(-1)

    def _move(self, report: SyncReport) -> None:
        super()._move(report)
        with phase(report, "wire", self.context.device):
            for k in range(self._rounds):
                self._round(k, report)

    def _round(self, k: int, report: SyncReport) -> None:
        """Headers, then payloads, then the boxes whose checksum disagreed."""
        out = {peer: streams[k] for peer, streams in self._out.items() if k < len(streams)}
        into = {peer: streams[k] for peer, streams in self._into.items() if k < len(streams)}
        headers: dict[int, Tensor] = {}
        payloads: dict[int, Tensor] = {}
        values: dict[tuple[int, int], Tensor] = {}
        for peer, items in out.items():
            rows, parts = [], []
            for number, item in enumerate(items):
                now = values[peer, number] = self._flat(item)
                form, count, payload = encode(now, self._sent.get((peer, k, number)))
                rows.append((form, count, payload.numel(), checksum(now)))
                parts.append(payload)
                report.bytes_saved += now.numel() * now.element_size() - payload.numel()
                kept = self._sent.get((peer, k, number))
                self._sent[peer, k, number] = now.clone() if kept is None else kept.copy_(now)
            headers[peer] = torch.tensor(rows, dtype=torch.int64)
            payloads[peer] = torch.cat(parts)
        got = self._swap(headers, {peer: (len(items), 4) for peer, items in into.items()}, torch.int64, report)
        sizes = {peer: (int(header[:, 2].sum()),) for peer, header in got.items()}
        data = self._swap(payloads, sizes, torch.uint8, report)
        wrong = {peer: self._apply(items, got[peer], data[peer]) for peer, items in into.items()}
        asked = self._swap(wrong, {peer: (len(items),) for peer, items in out.items()}, torch.int64, report)
        again = {peer: [n for n in range(len(out[peer])) if flags[n]] for peer, flags in asked.items()}
        whole = {peer: torch.cat([values[peer, n].view(torch.uint8) for n in numbers]) for peer, numbers in again.items() if numbers}
        report.bytes_saved -= sum(t.numel() for t in whole.values())
        missing = {peer: [n for n in range(len(into[peer])) if flags[n]] for peer, flags in wrong.items()}
        lengths = {
            peer: (sum(torch.Size(into[peer][n].box[1]).numel() * into[peer][n].dtype.itemsize for n in numbers),)
            for peer, numbers in missing.items()
            if numbers
        }
        for peer, resent in self._swap(whole, lengths, torch.uint8, report).items():
            at = 0
            for n in missing[peer]:
                item = into[peer][n]
                length = torch.Size(item.box[1]).numel() * item.dtype.itemsize
                self._write(item, partial(decode, DENSE, 0, resent[at : at + length]))
                at += length

    def _write(self, item: Item, change: Callable[[Tensor], None]) -> set[int]:
        """Apply a change to every place of a box in this engine; returns the checksums of the results in the type that travels."""
        totals = set()
        for part in self.agreement.targets(item.name, item.box):
            target = part.view(self._views[1])
            flat = target.detach().to(item.dtype).clone(memory_format=torch.contiguous_format).view(-1)
            change(flat)
            target.copy_(flat.view(target.shape))
            totals.add(checksum(flat))
        return totals

    def _apply(self, items: Sequence[Item], header: Tensor, payload: Tensor) -> Tensor:
        """Write the changes; returns int64 [items], 1 where the result is not what the sender has."""
        wrong, at = [], 0
        for item, (form, count, length, total) in zip(items, header.tolist(), strict=True):
            part = payload[at : at + length]
            at += length
            wrong.append(int(self._write(item, partial(decode, form, count, part)) != {total}))
        return torch.tensor(wrong, dtype=torch.int64)

    def _swap(
        self, out: dict[int, Tensor], shapes: Mapping[int, tuple[int, ...]], dtype: torch.dtype, report: SyncReport
    ) -> dict[int, Tensor]:
        """Send a tensor to each peer and receive one of known shape from each; empty ones are not sent."""
        nccl = dist.get_backend(self.group) == "nccl"
        device = self.context.device if nccl or dtype == torch.uint8 else torch.device("cpu")
        got = {peer: torch.empty(shape, dtype=dtype, device=device) for peer, shape in shapes.items()}
        operations = []
        for peer, tensor in out.items():
            if tensor.numel():
                report.bytes_sent += tensor.numel() * tensor.element_size()
                operations.append(dist.P2POp(dist.isend, tensor.to(device).contiguous(), self._global(peer), self.group))
        operations += [dist.P2POp(dist.irecv, t, self._global(peer), self.group) for peer, t in got.items() if t.numel()]
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
        return {peer: tensor.cpu() if dtype == torch.int64 else tensor for peer, tensor in got.items()}

    def _global(self, peer: int) -> int:
        return peer if self.group is None else dist.get_global_rank(self.group, peer)
