"""Reward `judge`: a generative model reads the sample and writes a grade; a pattern finds it."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, field_validator, model_validator

from jackfield import registry
from jackfield.components import ComponentConfig, Request, Reward, WorkerContext
from jackfield.config import ComponentSpec, ModelConfig, SamplingConfig
from jackfield.errors import DataError
from jackfield_rewards.chat import Remembered, template_of

QUESTION = """You are grading an answer.

Question:
{prompt}

Answer:
{response}

How good is the answer, from 0 (wrong or useless) to 10 (perfect)? Think briefly, then end with one line "Grade: <number>"."""


def _model(value: Any) -> Any:
    return {"path": value} if isinstance(value, str) else value


class JudgeConfig(ComponentConfig):
    """Settings of `judge`."""

    model: Annotated[ModelConfig, BeforeValidator(_model)]
    """The judge."""
    engine: ComponentSpec = ComponentSpec(name="hf")
    """Engine that generates the grades."""
    backend: ComponentSpec = ComponentSpec(name="torch")
    """Backend that loads the weights; the engine shares its storage where it can."""
    question: str = QUESTION
    """What the judge is asked; `{field}` stands for a field of the row, `{prompt}` and `{response}` among them."""
    template: Path | None = None
    """Jinja chat template; default: the model's own. Without either, the question is given as plain text."""
    pattern: str = r"Grade:\s*(-?\d+(?:\.\d+)?)"
    """Regular expression whose first group is the grade; the last match counts. No match: no score."""
    lowest: float = 0.0
    """The grade that becomes score 0; grades outside the range have no score."""
    highest: float = 10.0
    """The grade that becomes score 1."""
    votes: int = Field(default=1, gt=0)
    """Grades of each sample; its score is the mean of those that were found. More than one need a temperature."""
    temperature: float = Field(default=0.0, ge=0)
    """Sampling temperature; 0 is greedy."""
    max_new_tokens: int = Field(default=256, gt=0)
    """Longest judgement, in tokens."""
    remember: int = Field(default=100_000, ge=0)
    """Most scores kept by content, so that equal samples are judged once."""

    @field_validator("pattern")
    @classmethod
    def _one_group(cls, value: str) -> str:
        if re.compile(value).groups < 1:
            raise ValueError("the pattern needs a group around the grade, such as Grade: (\\d+)")
        return value

    @model_validator(mode="after")
    def _sense(self) -> JudgeConfig:
        if self.highest <= self.lowest:
            raise ValueError(f"highest ({self.highest:g}) must be above lowest ({self.lowest:g})")
        if self.votes > 1 and not self.temperature:
            raise ValueError(f"{self.votes} votes at temperature 0 would all be the same: set a temperature")
        return self


class Judge(Reward):
    """Works with every engine and backend; on several workers each holds a judge of its own."""

    Config = JudgeConfig
    config: Any

    def setup(self, context: WorkerContext) -> None:
        """See Reward. Raises DataError for an unusable model."""
        from transformers import AutoTokenizer

        try:
            self.tokenizer = AutoTokenizer.from_pretrained(self.config.model.path)
        except (OSError, ValueError) as error:
            line = " ".join(str(error).split())
            raise DataError(f"judge {self.config.model.path!r} has no usable tokenizer: {line}; give a folder or hub name") from error
        self.template = template_of(self.tokenizer, self.config.template)
        backend = registry.build("backend", self.config.backend)
        alone = replace(context, rank=0, world_size=1, group=None, dtype=getattr(backend.config, "dtype", "float32"))
        backend.setup(self.config.model, None, alone)
        self.engine = registry.build("engine", self.config.engine)
        self.engine.setup(self.config.model, alone)
        self.transport = registry.build("transport", ComponentSpec(name="auto"))
        self.transport.connect(backend, self.engine, alone)
        self.transport.sync(0)
        self.memory = Remembered(self.config.remember)

    def score(self, records: Sequence[dict[str, Any]]) -> list[Any]:
        """See Reward.score; None where no vote holds a grade."""
        return list(self.memory.through([self.text(r) for r in records], self._judge))

    def text(self, record: dict[str, Any]) -> str:
        """What the judge reads. Raises DataError for a field that the row lacks."""
        try:
            question = self.config.question.format_map(record)
        except KeyError as error:
            fields = ", ".join(map(str, record))
            raise DataError(f"judge: the question names the field {error}, but the row has {fields}") from error
        if self.template is None:
            return question
        chat = [{"role": "user", "content": question}]
        return str(self.tokenizer.apply_chat_template(chat, chat_template=self.template, tokenize=False, add_generation_prompt=True))

    def _judge(self, texts: list[str]) -> list[float | None]:
        sampling = SamplingConfig(temperature=self.config.temperature, max_new_tokens=self.config.max_new_tokens)
        requests = []
        for number, text in enumerate(texts):
            seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little")
            tokens = self.tokenizer(text, add_special_tokens=self.template is None)["input_ids"]
            requests.append(Request(number, tuple(tokens), tuple(seed + k for k in range(self.config.votes)), sampling))
        grades: list[list[float]] = [[] for _ in texts]
        for sample in self.engine.generate(requests):
            grade = self.grade(self.tokenizer.decode(sample.tokens, skip_special_tokens=True))
            if grade is not None:
                grades[sample.request_id].append(grade)
        return [sum(found) / len(found) if found else None for found in grades]

    def grade(self, text: str) -> float | None:
        """The judgement's score from 0 to 1; None where there is no grade, or none in the range."""
        found = re.findall(self.config.pattern, text)
        if not found:
            return None
        last = found[-1] if isinstance(found[-1], str) else found[-1][0]
        try:
            score = (float(last) - self.config.lowest) / (self.config.highest - self.config.lowest)
        except ValueError:
            return None
        return score if 0 <= score <= 1 else None
