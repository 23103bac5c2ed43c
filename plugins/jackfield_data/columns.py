"""What datasets of rows share: column mapping, the usual column names, limits."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import Any

from pydantic import Field

from jackfield.components import ComponentConfig, Dataset
from jackfield.errors import DataError

PROMPT_COLUMNS = ("prompt", "question", "problem", "instruction", "messages")
"""Where the prompt is looked for, in this order, if `columns` does not say."""
ANSWER_COLUMNS = ("answer", "solution", "ground_truth", "final_answer", "completion")
"""Where the answer is looked for."""


class RowsConfig(ComponentConfig):
    """Settings of datasets that are made of rows."""

    columns: dict[str, str] = {}
    """Field for the run: column of the data, such as `{prompt: question, answer: final}`. Other columns stay as they are. Unset, `prompt`
    and `answer` come from the usual columns, those of TRL's formats among them."""
    limit: int | None = Field(default=None, gt=0)
    """Use only the first rows."""


class Rows(Dataset):
    """A dataset whose rows come from somewhere: subclasses give `name`, `count` and `row`."""

    Config: type[ComponentConfig] = RowsConfig
    config: Any
    name: str
    """What to call the source in errors."""

    @abstractmethod
    def count(self) -> int:
        """Rows in the source."""

    @abstractmethod
    def row(self, index: int) -> dict[str, Any]:
        """A row as the source has it."""

    def check(self) -> None:
        """Call when the source is open. Raises DataError for an empty one, or one whose first row cannot be used."""
        if not self.count():
            raise DataError(f"{self.name} is empty: there is nothing to train on; give a dataset with at least one row")
        self[0]

    def __len__(self) -> int:
        return min(self.count(), self.config.limit or self.count())

    def __getitem__(self, index: int) -> dict[str, Any]:
        return mapped(self.row(index), self.config.columns, f"{self.name}, row {index}")


def mapped(row: dict[str, Any], columns: dict[str, str], where: str) -> dict[str, Any]:
    """The row with `prompt`, and `answer` where there is one. Raises DataError for a column that does not exist.

    TRL's formats are understood: text or messages under `prompt`, answers under `solution` or `completion`, and conversations under
    `messages`, of which the last turn, if it is the assistant's, is taken off as the answer.
    """
    missing = [column for column in columns.values() if column not in row]
    if missing:
        raise DataError(f"{where} has no column {missing[0]!r} (dataset.columns names it); it has: {', '.join(row)}")
    result = {**row, **{field: row[column] for field, column in columns.items()}}
    if "prompt" not in result:
        source = next((name for name in PROMPT_COLUMNS if name in row), None)
        if source is None:
            raise DataError(f"{where} has no prompt; map one with dataset.columns={{prompt: COLUMN}}; it has: {', '.join(row)}")
        result["prompt"] = row[source]
    if "answer" not in result:
        source = next((name for name in ANSWER_COLUMNS if name in row), None)
        if source is not None:
            result["answer"] = _text(row[source])
    prompt = result["prompt"]
    if isinstance(prompt, list) and len(prompt) > 1 and "prompt" not in row and _said_by_assistant(prompt[-1]):
        result["prompt"] = prompt[:-1]
        result.setdefault("answer", prompt[-1]["content"])
    return result


def _said_by_assistant(message: Any) -> bool:
    return isinstance(message, dict) and message.get("role") == "assistant" and "content" in message


def _text(value: Any) -> Any:
    """TRL's conversational completions are a list of one message."""
    return value[0]["content"] if isinstance(value, list) and len(value) == 1 and isinstance(value[0], dict) else value


def existing(path: Path, field: str) -> Path:
    """The path, home expanded. Raises DataError where nothing is there."""
    found = path.expanduser()
    if not found.exists():
        raise DataError(f"dataset.{field}: there is no {str(path)!r} (looked in {Path.cwd()}); correct the path")
    return found
