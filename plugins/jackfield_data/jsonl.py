"""Dataset `jsonl`: a file of one JSON object a line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jackfield.errors import DataError
from jackfield_data.columns import Rows, RowsConfig, existing


class JsonlConfig(RowsConfig):
    """Settings of `jsonl`."""

    path: Path
    """The file."""


class Jsonl(Rows):
    """All lines are read and checked at the start and kept as text; blank lines are skipped."""

    Config = JsonlConfig

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        path = existing(self.config.path, "path")
        self.name = str(self.config.path)
        try:
            raw = path.read_bytes()
        except OSError as error:
            raise DataError(f"{self.name} cannot be read: {error.strerror}; give a JSON-lines file") from error
        self.lines = [(number, line) for number, line in enumerate(raw.split(b"\n"), 1) if line.strip()]
        for number, line in self.lines:
            self._parsed(number, line)
        self.check()

    def count(self) -> int:
        """See Rows."""
        return len(self.lines)

    def row(self, index: int) -> dict[str, Any]:
        """See Rows."""
        return self._parsed(*self.lines[index])

    def _parsed(self, number: int, line: bytes) -> dict[str, Any]:
        try:
            row = json.loads(line)
        except ValueError as error:
            raise DataError(f"{self.name}:{number}: not JSON ({error}); correct or remove the line") from error
        if not isinstance(row, dict):
            raise DataError(f"{self.name}:{number}: a {type(row).__name__}, not an object; each line must be {{...}}")
        return row
