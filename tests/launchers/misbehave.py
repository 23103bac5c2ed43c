"""Backends that go wrong on one rank, at their second update."""

import os
import signal
import time

import torch

from jackfield.components import BackendConfig
from jackfield.testing.fakes import FakeBackend


class Misbehaving(FakeBackend):
    """Does `what` on rank `rank`."""

    class Config(BackendConfig):
        what: str
        rank: int = 1
        marker: str = ""
        """File that says it has happened: only the first time counts."""

    def forward_backward(self, micro_batches, loss):
        if self.steps == 1 and self.context.rank == self.config.rank and self._first_time():
            if self.config.what == "raise":
                raise ValueError("the sky is falling")
            if self.config.what == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.config.what == "exit":
                os._exit(3)
            if self.config.what == "late":
                time.sleep(3)
            if self.config.what == "no gradient":
                super().forward_backward(micro_batches, loss)
                self.zero_grad()
                return super().forward_backward([], loss)
        return super().forward_backward(micro_batches, loss)

    def _first_time(self):
        if not self.config.marker:
            return True
        if os.path.exists(self.config.marker):
            return False
        open(self.config.marker, "w").close()
        return True


class RaisesOnAll(FakeBackend):
    """The same error on every rank, outside any collective."""

    def forward(self, micro_batches, request):
        raise torch.OutOfMemoryError("out of memory: wanted 7 GiB")
