"""Dataset `hf`: what the `datasets` library can open: a folder written by save_to_disk, a folder of data files, or a hub name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets

from jackfield.errors import DataError
from jackfield_data.columns import Rows, RowsConfig


class HuggingFaceConfig(RowsConfig):
    """Settings of `hf`."""

    path: str
    """Folder or hub name."""
    subset: str | None = None
    """Configuration of the dataset, as `load_dataset` calls it."""
    split: str = "train"
    """Which split."""


class HuggingFace(Rows):
    """Memory-mapped by the library."""

    Config = HuggingFaceConfig

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self.name = f"{self.config.path} (split {self.config.split})"
        self.data = self._open()
        self.check()

    def _open(self) -> Any:
        folder, split = Path(self.config.path).expanduser(), self.config.split
        local = folder.exists() or self.config.path.startswith((".", "/", "~"))
        if local and not folder.exists():
            raise DataError(f"dataset.path: there is no folder {self.config.path!r} (looked in {Path.cwd()}); correct the path")
        try:
            if any((folder / name).is_file() for name in ("state.json", "dataset_dict.json")):
                found = datasets.load_from_disk(str(folder))
            else:
                found = datasets.load_dataset(str(folder) if local else self.config.path, self.config.subset)
        except Exception as error:
            why = " ".join(str(error).split())[:200]
            raise DataError(f"dataset.path {self.config.path!r} cannot be opened ({type(error).__name__}: {why}); give a folder") from error
        if not isinstance(found, dict):
            return found
        if split not in found:
            raise DataError(f"dataset.split: {self.config.path} has no split {split!r}; it has: {', '.join(found)}")
        return found[split]

    def count(self) -> int:
        """See Rows."""
        return len(self.data)

    def row(self, index: int) -> dict[str, Any]:
        """See Rows."""
        return dict(self.data[index])
