"""Transport `ipc`: a process reads what it needs straight from the memory of other processes on its host.

On CUDA the weights' storages are opened through CUDA IPC handles (also between GPUs with peer access, and between two processes on
one GPU, which NCCL refuses); on CPU they move to shared memory at connect. Nothing is packed: each box is one strided copy from the
owner's storage into the engine's. Ranks on other hosts are served by buckets as in `p2p`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from jackfield.shard import Shard, SyncReport
from jackfield_reshard.copies import CopyList
from jackfield_reshard.transports import Resharding, message_device, phase
from jackfield_reshard.wire import by_peer

Geometry = tuple[int, torch.dtype, int, tuple[int, ...], tuple[int, ...]]
"""(number of the storage, dtype, storage offset, size, stride) of a view."""


def _export(tensor: Tensor) -> Any:
    """A picklable handle of the whole storage behind a tensor; on CPU the storage moves to shared memory, in place."""
    storage = tensor.untyped_storage()
    if tensor.is_cuda:
        from torch.multiprocessing.reductions import reduce_tensor

        return reduce_tensor(  # type: ignore[no-untyped-call]
            torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
        )
    return storage._share_filename_cpu_()


def _open(handle: Any, cuda: bool) -> torch.UntypedStorage:
    """The storage behind a handle of another process."""
    if cuda:
        rebuild, arguments = handle
        opened: torch.UntypedStorage = rebuild(*arguments).untyped_storage()
        return opened
    return torch.UntypedStorage._new_shared_filename_cpu(*handle)


class Ipc(Resharding):
    """Shares within a process, reads from other processes of the host, sends between hosts."""

    shares = True
    wired = (2,)

    def _compile(self, have: Sequence[Shard], need: Sequence[Shard]) -> None:
        """Exchange handles (collective) and take views of the other processes' storages."""
        super()._compile(have, need)
        cuda = self.context.device.type == "cuda"
        sends, receives = by_peer(self.agreement, (1,))
        handles: list[Any] = []
        numbers: dict[int, int] = {}
        geometry: dict[int, list[Geometry]] = {}
        for peer, moves in sends.items():
            views = [self.agreement.origin(move.name, move.box).view(have) for move in moves]
            for view in views:
                if view.untyped_storage()._cdata not in numbers:
                    numbers[view.untyped_storage()._cdata] = len(handles)
                    handles.append(_export(view))
            geometry[peer] = [
                (numbers[v.untyped_storage()._cdata], v.dtype, int(v.storage_offset()), tuple(v.shape), v.stride()) for v in views
            ]
        self._remember(self._shards())  # sharing a CPU storage moves it
        everyone: list[Any] = [(handles, geometry)] * self.context.world_size
        if self.context.world_size > 1:
            dist.all_gather_object(everyone, (handles, geometry), group=self.group)
        targets, sources = [], []
        me = dist.get_rank(self.group) if self.context.world_size > 1 else 0
        for peer, moves in receives.items():
            opened = [_open(handle, cuda) for handle in everyone[peer][0]]
            for move, (number, dtype, offset, size, stride) in zip(moves, everyone[peer][1][me], strict=True):
                remote = torch.empty(0, dtype=dtype, device=opened[number].device).set_(opened[number], offset, size, stride)
                for part in self.agreement.targets(move.name, move.box):
                    targets.append(part.view(need))
                    sources.append(remote)
        self._reads = CopyList(targets, sources, self.config.graph)

    def sync(self, version: int) -> SyncReport:
        if self.context.world_size > 1:  # handles of storage that has moved are void, for everybody
            moved = torch.tensor([int(self._moved())], device=message_device(self.context.device, self.group))
            dist.all_reduce(moved, dist.ReduceOp.MAX, group=self.group)
            if moved.item():
                self._compile(*self._sides())
        return super().sync(version)

    def _move(self, report: SyncReport) -> None:
        device = self.context.device
        super()._move(report)
        with phase(report, "wire", device):
            if self.context.world_size > 1:
                dist.barrier(group=self.group)  # every trainer is done with its last step
            self._reads.run()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if self.context.world_size > 1:
                dist.barrier(group=self.group)  # nobody reads any more: trainers may go on
        report.bytes_sent += self._reads.bytes
