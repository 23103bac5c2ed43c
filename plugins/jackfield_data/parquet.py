"""Dataset `parquet`: a Parquet file, or a folder of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from jackfield.errors import DataError
from jackfield_data.columns import Rows, RowsConfig, existing


class ParquetConfig(RowsConfig):
    """Settings of `parquet`."""

    path: Path | list[Path]
    """The file, or a folder whose `*.parquet` are read in the order of their names; or a list of these."""


class Parquet(Rows):
    """Held in memory in Arrow's form; rows become Python objects when they are asked for."""

    Config = ParquetConfig

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        paths = self.config.path if isinstance(self.config.path, list) else [self.config.path]
        self.name = ", ".join(map(str, paths))
        found = [existing(path, "path") for path in paths]
        files = [file for path in found for file in (sorted(path.rglob("*.parquet")) if path.is_dir() else [path])]
        if not files:
            raise DataError(f"{self.name} holds no *.parquet file; give a Parquet file or a folder of them")
        try:
            self.table = pyarrow.concat_tables([pyarrow.parquet.read_table(f) for f in files], promote_options="default")
        except (pyarrow.ArrowException, OSError) as error:
            raise DataError(f"{self.name} cannot be read as Parquet: {' '.join(str(error).split())}; give a whole Parquet file") from error
        self.check()

    def count(self) -> int:
        """See Rows."""
        return self.table.num_rows

    def row(self, index: int) -> dict[str, Any]:
        """See Rows."""
        return self.table.slice(index, 1).to_pylist()[0]
