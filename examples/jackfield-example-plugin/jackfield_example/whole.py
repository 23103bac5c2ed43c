"""Transport `whole`: brings the trainer's weights into the engine."""

from time import perf_counter

from jackfield import Backend, Engine, Transport
from jackfield.components import WorkerContext
from jackfield.errors import ConfigError
from jackfield.shard import SyncReport


class Whole(Transport):
    """Within one process: shares storage where the engine can, copies whole weights by name where it cannot."""

    def connect(self, source: Backend | None, destination: Engine | None, context: WorkerContext) -> None:
        """Plan once. A shard is a named box of a tensor; this transport wants equal boxes on both sides."""
        if source is None or destination is None:
            raise ConfigError("transport 'whole' works where backend and engine share a process: use p2p for others")
        self.destination = destination
        have = {shard.name: shard for shard in source.shards()}
        wanted = destination.shards()
        strange = [w.name for w in wanted if w.name not in have or have[w.name].size != w.size]
        if strange:
            raise ConfigError(f"transport 'whole' copies whole weights, but {strange[0]} is laid out otherwise: use auto")
        self.pairs = [(have[w.name], w) for w in wanted]
        self.shared = destination.adopt([h for h, _ in self.pairs])
        if not self.shared and any(w.tensor is None for w in wanted):
            raise ConfigError("transport 'whole': the engine has no storage of its own and does not adopt the trainer's: use auto")

    def sync(self, version: int) -> SyncReport:
        """Make the engine's weights the trainer's, then let it drop its caches."""
        begin, size = perf_counter(), sum(h.tensor.nbytes for h, _ in self.pairs if h.tensor is not None)
        if not self.shared:
            for have, wanted in self.pairs:
                wanted.tensor.copy_(have.tensor)
        self.destination.weights_updated(version)
        counted = {"bytes_aliased": size} if self.shared else {"bytes_copied": size}
        return SyncReport(version, {"copy": perf_counter() - begin}, **counted)
