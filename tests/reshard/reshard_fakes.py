"""A backend and an engine made of bare tensors: what transports need and nothing more."""

from dataclasses import replace

import torch

from jackfield.components import Backend, Engine, Position
from jackfield.shard import Shard

DEVICE = "cpu"
"""Where ranks keep their weights; bench/multi_gpu.py runs the tests of several ranks with "cuda"."""


def place(rank):
    """The rank's device."""
    return torch.device(DEVICE if DEVICE == "cpu" else f"{DEVICE}:{rank}")


def shard(name, tensor, shape=None, offset=None, dtype=None):
    """A shard over a tensor; by default the whole logical tensor."""
    size = tuple(tensor.shape)
    return Shard(name, tuple(shape or size), tuple(offset or (0,) * len(size)), size, dtype or str(tensor.dtype)[6:], tensor)


class FakeBackend(Backend):
    """Holds the shards it is given; adopts by re-pointing them."""

    def __init__(self, shards, adopts=True):
        super().__init__()
        self.held, self.adopts = list(shards), adopts

    def setup(self, model, optimizer, context): ...

    position = Position()

    def forward(self, micro_batches, request): ...

    def forward_backward(self, micro_batches, loss): ...

    def optimizer_step(self): ...

    def zero_grad(self): ...

    def shards(self):
        return list(self.held)

    def adopt(self, shards):
        if not self.adopts:
            return False
        new = {(s.name, s.offset, s.size): s.tensor for s in shards}
        for index, old in enumerate(self.held):
            tensor = new.get((old.name, old.offset, old.size))
            if tensor is not None:
                tensor.copy_(old.tensor)
                self.held[index] = replace(old, tensor=tensor)
        return True

    def save(self, folder): ...

    def load(self, folder): ...

    def export(self, folder): ...


class FakeEngine(Engine):
    """Needs the shards it is given; with `takes` it serves from the backend's storage."""

    def __init__(self, shards, takes=False):
        super().__init__()
        self.needs, self.takes, self.updates = list(shards), takes, 0

    def setup(self, model, context): ...

    def generate(self, requests):
        yield from ()

    def shards(self):
        return list(self.needs)

    def adopt(self, shards):
        if self.takes:
            assert [(s.name, s.offset, s.size) for s in shards] == [(s.name, s.offset, s.size) for s in self.needs]
            assert all(tuple(s.tensor.shape) == s.size for s in shards)
            self.needs = list(shards)
        return self.takes

    def weights_updated(self, version):
        self.version = version
        self.updates += 1


def randomise(backend):
    """Give every weight of the backend new values."""
    with torch.no_grad():
        for s in backend.held:
            s.tensor.copy_(torch.randn(s.tensor.shape))
