"""Reading and writing Hugging Face weights, each rank only its own boxes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from jackfield.errors import DataError
from jackfield_megatron.placement import Place

SHARD_BYTES = 4 << 30
"""Most bytes in one exported file."""


def model_folder(path: str) -> Path:
    """The local folder of a model, downloaded if `path` is a hub name. Raises DataError."""
    folder = Path(path)
    if folder.is_dir():
        return folder
    if folder.is_absolute() or path.startswith("."):
        raise DataError(f"there is no model folder {path}")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(path, allow_patterns=["*.json", "*.safetensors", "*.model", "*.jinja"]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise DataError(f"{path} is neither a local folder nor a model that can be downloaded: {error}") from error


class Folder:
    """The tensors of a safetensors folder, read slice by slice."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            self.files: dict[str, Path] = {n: folder / f for n, f in json.loads(index.read_text())["weight_map"].items()}
        else:
            self.files = {}
            for file in sorted(folder.glob("*.safetensors")):
                with safe_open(file, "pt") as opened:
                    self.files |= dict.fromkeys(opened.keys(), file)
        if not self.files:
            raise DataError(f"{folder} holds no *.safetensors; convert the checkpoint, or say init: random")
        self._open: dict[Path, Any] = {}

    def names(self) -> Iterable[str]:
        """All tensor names."""
        return self.files

    def read(self, name: str, offset: Sequence[int], size: Sequence[int]) -> Tensor:
        """One box."""
        file = self.files[name]
        if file not in self._open:
            self._open[file] = safe_open(file, "pt").__enter__()
        return self._open[file].get_slice(name)[tuple(slice(o, o + s) for o, s in zip(offset, size, strict=True))]


class Memory:
    """The same for tensors in memory."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    def names(self) -> Iterable[str]:
        """All tensor names."""
        return self.tensors

    def read(self, name: str, offset: Sequence[int], size: Sequence[int]) -> Tensor:
        """One box."""
        return self.tensors[name][tuple(slice(o, o + s) for o, s in zip(offset, size, strict=True))]


def random_weights(config: Any, seed: int) -> Memory:
    """What every backend starts from with `init: random`: drawn by transformers in float32 from the seed."""
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return Memory(dict(model.named_parameters(remove_duplicate=True)))


@torch.no_grad()
def load(items: Sequence[Place], source: Folder | Memory, *, optional: Sequence[str] = ()) -> None:
    """Fill the places. Names in `optional` stay as they are where the source lacks them. Raises DataError."""
    for place, box in _boxes(items, source, optional):
        place.tensor.copy_(box)


@torch.no_grad()
def float32(items: Sequence[Place], source: Folder | Memory, *, optional: Sequence[str] = ()) -> Iterator[tuple[Tensor, Tensor]]:
    """Each parameter with its values in float32, for masters that are more precise than the weights; padding rows are 0."""
    last: Tensor | None = None
    whole = torch.empty(0)
    for place, box in _boxes(items, source, optional):
        if place.parameter is not last:
            if last is not None:
                yield last, whole
            last, whole = place.parameter, torch.zeros(place.parameter.shape)
        block = whole[place.rows]
        block.copy_(box.reshape(block.shape))
    if last is not None:
        yield last, whole


def _boxes(items: Sequence[Place], source: Folder | Memory, optional: Sequence[str]) -> Iterator[tuple[Place, Tensor]]:
    known = set(source.names())
    for place in items:
        if place.name in known:
            box = source.read(place.name, place.offset, place.size)
        elif place.file in known:
            box = source.read(place.file, place.file_offset, place.size[-len(place.file_offset) :])
        elif place.name in optional:
            continue
        else:
            raise DataError(f"the checkpoint has no tensor {place.name}" + (f" nor {place.file}" if place.file != place.name else ""))
        yield place, box.reshape(place.size)


class Writer:
    """Collects whole tensors and writes them as a Hugging Face folder, a few gigabytes a file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pending: dict[str, Tensor] = {}
        self.size = 0
        self.index: dict[str, str] = {}
        self.total = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """One tensor, on the CPU."""
        if self.size + tensor.nbytes > SHARD_BYTES and self.pending:
            self._flush()
        self.pending[name] = tensor.contiguous()
        self.size += tensor.nbytes
        self.total += tensor.nbytes

    def _flush(self) -> None:
        file = f"model-{len(set(self.index.values())) + 1:05d}.safetensors"
        save_file(self.pending, self.folder / file, metadata={"format": "pt"})
        self.index |= dict.fromkeys(self.pending, file)
        self.pending, self.size = {}, 0

    def close(self) -> None:
        """Write the rest: one `model.safetensors`, or the index of several files."""
        if not self.index:
            save_file(self.pending, self.folder / "model.safetensors", metadata={"format": "pt"})
            return
        self._flush()
        index = {"metadata": {"total_size": self.total}, "weight_map": self.index}
        (self.folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


@torch.no_grad()
def export(items: Sequence[Place], folder: Path, *, rank: int, world: int, device: torch.device) -> None:
    """Write all ranks' places as whole tensors, from rank 0, one tensor at a time; collective."""
    boxes = {(p.file, p.file_offset): p for p in items}
    mine = [(p.file, p.file_shape, p.file_offset, tuple(p.size[-len(p.file_shape) :]), p.parameter.dtype) for p in boxes.values()]
    everyone: list[Any] = [mine]
    if world > 1:
        everyone = [None] * world
        dist.all_gather_object(everyone, mine)
    owners: dict[str, dict[tuple[int, ...], tuple[int, Any]]] = {}
    for owner, listed in enumerate(everyone):
        for entry in listed:
            owners.setdefault(entry[0], {}).setdefault(entry[2], (owner, entry))
    writer = Writer(folder) if rank == 0 else None
    for name in sorted(owners):
        whole: Tensor | None = None
        for offset, (owner, (_, shape, _, size, dtype)) in sorted(owners[name].items()):
            if rank == owner:
                box = boxes[name, offset].tensor.reshape(size).contiguous()
                if rank != 0:
                    dist.send(box, 0)
            elif rank == 0:
                box = torch.empty(size, dtype=dtype, device=device)
                dist.recv(box, owner)
            if rank == 0:
                whole = torch.empty(shape, dtype=dtype) if whole is None else whole
                whole[tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))] = box.cpu()
        if writer is not None and whole is not None:
            writer.add(name, whole)
    if writer is not None:
        writer.close()
    if world > 1:
        dist.barrier()
