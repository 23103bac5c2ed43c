"""Launcher `ray`."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any, Literal

import ray
from pydantic import Field
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from jackfield.components import ComponentConfig, Launcher
from jackfield.config import RunConfig
from jackfield.errors import ConfigError, WorkerError
from jackfield.launcher import WorkerGroup
from jackfield_ray.actor import RayHost
from jackfield_ray.group import Crew, RayGroup, RayWorker
from jackfield_workers.fingerprint import Fingerprint, fingerprint
from jackfield_workers.host import Seat
from jackfield_workers.placement import Pool, first_ranks, linked, pools


class RayLauncher(Launcher):
    """Workers on a Ray cluster. The workers of a pool stand in one placement group, ordered by node and GPU."""

    class Config(ComponentConfig):
        """Which cluster, how many workers, and what each takes of it."""

        address: str = "local"
        """`local` starts a cluster for this run; `auto` finds the one that runs on this host; or `host:port`."""
        workers: int | None = Field(default=None, gt=0)
        """Workers of all roles together; default: one for each GPU of the cluster, or one where there is none."""
        device: Literal["auto", "cpu", "cuda"] = "auto"
        """auto: GPUs if the cluster has any."""
        cpus: float | None = Field(default=None, gt=0)
        """CPUs (or a share of one) that each worker takes; default: the cluster's, divided by the workers, at most 1 beside a GPU."""
        strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"
        """How Ray places the workers of a pool: PACK on as few nodes as it can, STRICT_PACK on one."""
        resources: dict[str, dict[str, float]] = {}
        """Custom Ray resources that each worker takes, by pool: `{critic: {big_memory: 1}}` puts the critic on nodes that have it."""
        object_store_bytes: int | None = Field(default=None, ge=78_643_200)
        """Size of the object store of a `local` cluster, in bytes; default: Ray's own choice (30% of memory)."""
        start_seconds: float = Field(default=120.0, gt=0)
        """Seconds to wait for the cluster to have room."""
        timeout: float = Field(default=600.0, gt=0)
        """Seconds a collective may wait for its slowest rank before every rank gives up."""

    config: Config
    crew: Crew | None = None
    owned = False
    """Whether this launcher has started the cluster."""

    def start(self, config: RunConfig, roles: Sequence[str]) -> dict[str, WorkerGroup]:
        """Connect, place and start the workers. Raises ConfigError where the roles do not fit, WorkerError where a worker fails."""
        self._connect()
        self.placements: list[Any] = []
        cluster = ray.cluster_resources()
        cuda, available = self._devices(cluster)
        found = pools(config, roles, available)
        total = sum(pool.size for pool in found)
        cpus = self.config.cpus or min(cluster.get("CPU", 1.0) / total, 1.0 if cuda else float("inf"))
        crew = self.crew = Crew()
        expected = fingerprint(config)
        workers = {pool.name: self._place(pool, cpus, cuda, config, crew) for pool in found}
        starting: dict[Any, RayWorker] = {}
        for pool in found:
            starting |= self._start(pool, workers[pool.name], config, expected, cuda, max(int(cpus), 1))
        self._started(starting)
        groups = {pool.name: RayGroup(workers[pool.name], crew) for pool in found}
        result: dict[str, WorkerGroup] = {role: groups[pool.name] for pool in found for role in pool.roles}
        if link := linked(found):
            both = RayGroup([w for pool in link for w in workers[pool.name]], crew)
            address = ray.get(both.workers[0].actor.serve.remote("link", both.size, self.config.timeout))
            both.call("link", address, first_ranks(link), both.size)
            result["link"] = both
        return result

    def _connect(self) -> None:
        if ray.is_initialized():
            return
        own: dict[str, Any] = {"object_store_memory": self.config.object_store_bytes, "include_dashboard": False}
        if self.config.address == "local" and self.config.device == "cpu":
            own["num_cpus"] = max(len(os.sched_getaffinity(0)), self.config.workers or 1)
        try:
            ray.init(
                self.config.address,
                log_to_driver=False,
                logging_level=logging.ERROR,
                configure_logging=True,
                **(own if self.config.address == "local" else {}),
            )
        except (ConnectionError, RuntimeError) as error:
            line = " ".join(str(error).split())
            raise ConfigError(
                f"launcher ray cannot reach the cluster at {self.config.address!r}: {line}; start one with `ray start --head`, or set "
                "address to local"
            ) from error
        self.owned = self.config.address == "local"

    def _devices(self, cluster: dict[str, float]) -> tuple[bool, int]:
        gpus = int(cluster.get("GPU", 0)) if self.config.device != "cpu" else 0
        if self.config.device == "cuda" and not gpus:
            raise ConfigError(f"launcher ray: device is 'cuda' but none of the {len(ray.nodes())} nodes offers a GPU: set device to 'cpu'")
        available = self.config.workers or gpus or 1
        if gpus and available > gpus:
            raise ConfigError(f"launcher ray: workers is {available} but the cluster has {gpus} GPUs; one worker takes one GPU")
        return bool(gpus), available

    def _place(self, pool: Pool, cpus: float, cuda: bool, config: RunConfig, crew: Crew) -> list[RayWorker]:
        """The pool's actors, in the order of their ranks."""
        custom = self.config.resources.get(pool.name, {})
        bundle = {"CPU": cpus, **({"GPU": 1.0} if cuda else {}), **custom}
        group = placement_group([bundle] * pool.size, strategy=self.config.strategy)
        self.placements.append(group)
        if not group.wait(self.config.start_seconds):
            want = ", ".join(f"{n} {amount * pool.size:g}" for n, amount in bundle.items())
            free = ray.available_resources()
            raise ConfigError(
                f"{pool.name} needs {pool.size} workers with {want} in all ({self.config.strategy}), but after "
                f"{self.config.start_seconds:g} s only {', '.join(f'{n} {free.get(n, 0):g}' for n in bundle)} are free"
            )
        actors = []
        for index in range(pool.size):
            where = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
            made: Any = ray.remote(RayHost)
            made = made.options(
                num_cpus=cpus, num_gpus=int(cuda), resources=custom, scheduling_strategy=where, max_restarts=0, max_task_retries=0
            )
            actors.append(made.remote())
        try:
            places = ray.get([actor.where.remote() for actor in actors], timeout=self.config.start_seconds)
        except (GetTimeoutError, RayError) as error:
            raise WorkerError(f"a worker of {pool.name} could not start: {' '.join(str(error).split())}") from error
        order = sorted(range(pool.size), key=lambda i: (places[i].node, places[i].gpu, i))
        logs = (config.dir / "workers").resolve()
        result = [
            RayWorker(actors[i], f"{pool.name} worker {rank} of {pool.size}", places[i], str(logs / f"{pool.name}-{rank}.log"))
            for rank, i in enumerate(order)
        ]
        crew.workers += result
        return result

    def _start(
        self, pool: Pool, workers: list[RayWorker], config: RunConfig, expected: Fingerprint, cuda: bool, threads: int
    ) -> dict[Any, RayWorker]:
        store = ray.get(workers[0].actor.serve.remote("pool", pool.size, self.config.timeout))
        calls = {}
        for rank, worker in enumerate(workers):
            seat = Seat(pool.name, rank, pool.size, "cuda:0" if cuda else "cpu", store, threads, self.config.timeout)
            calls[worker.actor.start.remote(seat, config, expected, os.getcwd(), worker.log)] = worker
        return calls

    def _started(self, calls: dict[Any, RayWorker]) -> None:
        """Wait for all; the first failure is raised at once, since the others then wait for a rank that never comes."""
        pending = list(calls)
        while pending:
            (ready, *_), pending = ray.wait(pending, num_returns=1)
            worker = calls[ready]
            try:
                failure = ray.get(ready)
            except RayError as error:
                raise WorkerError(f"{worker.name} {worker.fate(error)} during start; its output is in {worker.log}") from error
            if failure is not None:
                raise failure.raised(f"{worker.name} ({worker.place})", "start", worker.log)

    def stop(self) -> None:
        """End every worker, give the placement groups back, and end the cluster if it was started here."""
        if self.crew is not None and ray.is_initialized():
            self.crew.kill()
            for group in self.placements:
                remove_placement_group(group)
        if self.owned:
            ray.shutdown()
            self.owned = False
