"""Transport `disk`: versions of the weights as safetensors files with an index, in a folder that engine hosts share.

Each element is written once, by one of its holders (the plan spreads the work); an engine rank reads only its own boxes. A version
becomes visible by one rename, so that a reader never sees half of it, and an engine host that was away catches up with `load_version`.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from pydantic import Field

from jackfield.components import Backend, ComponentConfig, Engine, Transport, WorkerContext
from jackfield.errors import DataError
from jackfield.shard import Shard, SyncReport
from jackfield_reshard.canonical import align
from jackfield_reshard.checksum import checksum
from jackfield_reshard.cover import by_name, cover
from jackfield_reshard.exchange import Agreement, agree
from jackfield_reshard.local import Part
from jackfield_reshard.transports import phase

INDEX = "index.json"


def versions(folder: Path) -> list[int]:
    """Complete versions in a folder, oldest first."""
    found = [int(path.parent.name[1:]) for path in folder.glob(f"v*/{INDEX}") if path.parent.name[1:].isdigit()]
    return sorted(found)


def _read_index(folder: Path, version: int) -> dict[str, Any]:
    path = folder / f"v{version:08d}" / INDEX
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError) as error:
        raise DataError(f"weights {path}: cannot be read ({error}); versions there: {versions(folder) or 'none'}") from error


def load_version(folder: Path, engine: Engine, version: int | None = None, verify: bool = False) -> SyncReport:
    """Bring an engine to a version (the newest by default) from files alone; other ranks and the trainer need not be there.

    Raises DataError where the version is missing, incomplete or (with `verify`) corrupt, and ConfigError where a weight is absent.
    """
    from safetensors import SafetensorError, safe_open

    if version is None:
        if not versions(folder):
            raise DataError(f"weights folder {folder}: holds no complete version")
        version = versions(folder)[-1]
    report = SyncReport(version)
    index = _read_index(folder, version)
    stored = [Shard(e["name"], tuple(e["shape"]), tuple(e["offset"]), tuple(e["size"]), e["dtype"]) for e in index["boxes"]]
    need = engine.shards()
    (mine,), (theirs,) = align([stored], [need])
    held = by_name(mine)
    wanted: dict[str, list[tuple[Any, Part]]] = {}
    for piece in theirs:
        found, missing = cover(piece.box, held.get(piece.name, ()), lambda own: own.box)
        if missing:
            raise DataError(f"weight {piece.name}: version {version} in {folder} does not hold offset {list(missing[0][0])}")
        for own, box in found:
            wanted.setdefault(index["boxes"][own.shard]["file"], []).append((own, Part(piece, box)))
    home = folder / f"v{version:08d}"
    for file, parts in wanted.items():
        try:
            with safe_open(home / file, "pt") as opened:
                for own, part in parts:
                    entry = index["boxes"][own.shard]
                    tensor = opened.get_tensor(entry["key"]) if verify or own.shape != tuple(entry["shape"]) else None
                    if tensor is None:
                        low = [o - e for o, e in zip(part.box[0], entry["offset"], strict=True)]
                        values = opened.get_slice(entry["key"])[tuple(slice(a, a + n) for a, n in zip(low, part.box[1], strict=True))]
                    else:
                        if verify and checksum(tensor) != entry["checksum"]:
                            raise DataError(f"weights {home / file}: {entry['name']} is corrupt (its checksum differs); sync again")
                        values = Part(own, part.box).of(tensor)
                    target = part.view(need)
                    target.copy_(values)
                    report.bytes_copied += target.numel() * target.element_size()
        except (OSError, SafetensorError) as error:
            raise DataError(f"weights {home / file}: cannot be read ({error})") from error
    return report


class Disk(Transport):
    """Writes every version to files and reads it back into the engines."""

    class Config(ComponentConfig):
        """Settings of `disk`."""

        folder: Path
        """A folder that all hosts share."""
        keep: int = Field(default=2, gt=0)
        """Newest versions kept."""
        verify: bool = False
        """Compare every box that is read with the checksum in the index."""

    config: Config

    def connect(self, source: Backend | None, destination: Engine | None, context: WorkerContext) -> None:
        """Choose who writes what (collective). Either side may be None, as for transports between separate processes."""
        self.source, self.destination, self.context = source, destination, context
        self.group: Any = getattr(context, "group", None)
        self.config.folder.mkdir(parents=True, exist_ok=True)
        have = source.shards() if source is not None else None
        everything = _everything(have, context.world_size, self.group)
        self.agreement: Agreement = agree(have, everything, context.world_size, self.group, apart=True)

    def _rank(self) -> int:
        return dist.get_rank(self.group) if self.context.world_size > 1 else 0

    def _barrier(self) -> None:
        if self.context.world_size > 1:
            dist.barrier(group=self.group)

    def sync(self, version: int) -> SyncReport:
        """Write, publish by one rename, read."""
        report, device = SyncReport(version), self.context.device
        partial = self.config.folder / f".v{version:08d}.partial"
        with phase(report, "pause", device):
            if self._rank() == 0:
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir(parents=True)
            self._barrier()
        with phase(report, "copy", device):
            boxes = self._write(partial, report)
            everyone: list[Any] = [boxes]
            if self.context.world_size > 1:
                everyone = [None] * self.context.world_size
                dist.all_gather_object(everyone, boxes, group=self.group)
            if self._rank() == 0:
                self._publish(partial, version, [box for own in everyone for box in own])
            self._barrier()
        if self.destination is not None:
            with phase(report, "load", device):
                report.bytes_copied = load_version(self.config.folder, self.destination, version, self.config.verify).bytes_copied
            with phase(report, "resume", device):
                self.destination.weights_updated(version)
        self._barrier()
        return report

    def _write(self, partial: Path, report: SyncReport) -> list[dict[str, Any]]:
        """This rank's file; returns its entries of the index."""
        from safetensors.torch import save_file

        if self.source is None or self.agreement.source is None:
            return []
        have, file = self.source.shards(), f"rank{self._rank():05d}.safetensors"
        tensors, boxes = {}, []
        for number, move in enumerate(self.agreement.plan.moves(source=self.agreement.source)):
            part = self.agreement.origin(move.name, move.box)
            tensor = part.view(have).detach().cpu().contiguous()
            key, dtype = f"{number}:{move.name}", str(tensor.dtype).removeprefix("torch.")
            tensors[key] = tensor
            entry = {"name": move.name, "shape": part.piece.shape, "offset": move.box[0], "size": move.box[1], "dtype": dtype}
            boxes.append(entry | {"file": file, "key": key, "checksum": checksum(tensor)})
            report.bytes_sent += tensor.numel() * tensor.element_size()
        save_file(tensors, partial / file)
        _flush(partial / file)
        return boxes

    def _publish(self, partial: Path, version: int, boxes: Sequence[dict[str, Any]]) -> None:
        (partial / INDEX).write_text(json.dumps({"version": version, "boxes": boxes}))
        _flush(partial / INDEX)
        final = self.config.folder / f"v{version:08d}"
        shutil.rmtree(final, ignore_errors=True)
        os.replace(partial, final)
        _flush(self.config.folder)
        for old in versions(self.config.folder)[: -self.config.keep]:
            shutil.rmtree(self.config.folder / f"v{old:08d}", ignore_errors=True)


def _flush(path: Path) -> None:
    """Make a file or folder survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _everything(have: Sequence[Shard] | None, world_size: int, group: Any) -> list[Shard] | None:
    """The disk as a destination that needs the whole model; rank 0 speaks for it."""
    mine = [replace(shard, tensor=None) for shard in have or ()]
    everyone: list[Any] = [mine]
    if world_size > 1:
        everyone = [None] * world_size
        dist.all_gather_object(everyone, mine, group=group)
        if dist.get_rank(group):
            return None
    pieces, _ = align(everyone, [])
    whole = {p.name: Shard(p.name, p.shape, (0,) * len(p.shape), p.shape, p.dtype) for own in pieces for p in own}
    return list(whole.values())
