"""From a dataset's row to prompt tokens: the tokenizer, chat templates, the context's limit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field
from transformers import AutoConfig, AutoTokenizer

from jackfield.batch import Prompt
from jackfield.components import ComponentConfig
from jackfield.errors import ConfigError, DataError

NO_LIMIT = 10**9
"""Tokenizers without a length limit report a number above this."""


class PromptConfig(ComponentConfig):
    """How prompts become tokens."""

    chat: Literal["auto", "always", "never"] = "auto"
    """Whether a text prompt is put into the chat template as a user's message: auto, where the tokenizer has a template; never, it is
    tokenized as it stands. Prompts that are lists of chat messages always go through the template."""
    system: str | None = None
    """System message put before prompts that have none; needs the chat template."""
    template: Path | None = None
    """Jinja file that replaces the tokenizer's chat template."""
    template_options: dict[str, Any] = {}
    """Variables for the template, such as `enable_thinking: false`."""
    context: int | None = Field(default=None, gt=0)
    """Most tokens of prompt and response together; default: the model's `max_position_embeddings`."""
    overlong: Literal["error", "drop"] = "error"
    """What happens to a prompt that leaves no room for `sampling.max_new_tokens`: stop, or drop it and count `rollout/overlong`."""


@dataclass(frozen=True)
class Encoded:
    """A prompt as the engine gets it."""

    prompt: Prompt
    text: str
    """The row's text, or its chat messages as the template renders them."""
    tokens: tuple[int, ...]


def load_tokenizer(path: str) -> Any:
    """The tokenizer in a model folder or of a hub name. Raises DataError on one line."""
    folder = Path(path).expanduser()
    local = folder.exists() or path.startswith((".", "/", "~")) or path.count("/") > 1
    if local and not folder.is_dir():
        raise DataError(f"policy.model: there is no folder {path!r}; give a local Hugging Face folder or a hub name")
    if local and not (folder / "config.json").is_file():
        raise DataError(f"policy.model: {path!r} holds no config.json; give a Hugging Face folder, as save_pretrained writes it")
    try:
        return AutoTokenizer.from_pretrained(str(folder) if local else path)
    except Exception as error:
        why = " ".join(str(error).split())[:200]
        kind = "the folder has no usable tokenizer" if local else "it is neither a folder here nor a model that the hub gave"
        raise DataError(f"policy.model {path!r}: {kind} ({type(error).__name__}: {why}); give a local Hugging Face folder") from error


class PromptEncoder:
    """Renders and tokenizes prompts under a PromptConfig."""

    def __init__(self, config: PromptConfig, model: str, tokenizer: Any) -> None:
        self.config, self.tokenizer = config, tokenizer
        self.template = tokenizer.chat_template
        if config.template is not None:
            if not config.template.is_file():
                raise ConfigError(f"rollout.template: there is no file {str(config.template)!r}; give a Jinja chat template")
            self.template = config.template.read_text(encoding="utf-8")
        if config.chat == "always" and self.template is None:
            raise ConfigError(f"rollout.chat is 'always', but the tokenizer of {model!r} has no chat template; set rollout.template")
        if config.system is not None and (config.chat == "never" or self.template is None):
            raise ConfigError("rollout.system needs a chat template, but none is in use; set rollout.template, and chat to auto or always")
        self.context, self.vocabulary = _limits(model, tokenizer)
        self.context = config.context or self.context

    @property
    def chats(self) -> bool:
        """Whether text prompts go through the template."""
        return self.config.chat != "never" and self.template is not None

    def encode(self, prompt: Prompt) -> Encoded:
        """Tokens of one prompt. Raises DataError for a row without a usable prompt."""
        where = f"prompt {prompt.id}"
        if not isinstance(prompt.record, dict):
            raise DataError(f"{where}: the dataset returned a {type(prompt.record).__name__} as a row; a dict with `prompt` is wanted")
        content = prompt.record.get("prompt")
        if is_chat(content) and self.template is None:
            raise DataError(f"{where} is a list of chat messages, but the tokenizer has no chat template; set rollout.template")
        if not isinstance(content, str) and not is_chat(content):
            keys = ", ".join(map(str, prompt.record)) or "nothing"
            raise DataError(
                f"{where} has no usable `prompt` (text, or messages with role and content): its row has {keys}; map it with dataset.columns"
            )
        try:
            text = content if isinstance(content, str) else self.render(content)
            ids = self._text(text) if isinstance(content, str) else self.tokenizer(text, add_special_tokens=False)["input_ids"]
        except Exception as error:
            why = " ".join(f"{type(error).__name__}: {error}".split())
            raise DataError(
                f"{where} cannot be rendered or tokenized ({why}): its text is {str(content)[:60]!a}; correct the row"
            ) from error
        if not ids:
            raise DataError(f"{where} is empty: its text {text[:40]!r} gives 0 tokens; remove the row")
        if self.vocabulary is not None and max(ids) >= self.vocabulary:
            raise DataError(
                f"{where} has token {max(ids)}, but the model's vocab_size is {self.vocabulary}: its folder has another model's tokenizer"
            )
        return Encoded(prompt, text, tuple(ids))

    def _text(self, text: str) -> list[int]:
        if not self.chats:
            return list(self.tokenizer(text)["input_ids"])
        return list(self.tokenizer(self.render([{"role": "user", "content": text}]), add_special_tokens=False)["input_ids"])

    def render(self, messages: Sequence[dict[str, Any]], *, open_turn: bool = True) -> str:
        """The chat as text; `open_turn` ends it where the assistant's next words begin (within its message, if that is the last)."""
        chat = [dict(m) for m in messages]
        if self.config.system is not None and chat[0]["role"] != "system":
            chat.insert(0, {"role": "system", "content": self.config.system})
        options = self.config.template_options
        within = open_turn and chat[-1]["role"] == "assistant"
        return self.tokenizer.apply_chat_template(
            chat,
            chat_template=self.template,
            tokenize=False,
            add_generation_prompt=open_turn and not within,
            continue_final_message=within,
            **options,
        )

    def select(self, prompts: Sequence[Prompt], max_new_tokens: int) -> tuple[list[Encoded], int]:
        """Encoded prompts that leave room for a response, and how many were dropped. Raises DataError under `overlong: error`."""
        encoded = [self.encode(p) for p in prompts]
        if self.context is None:
            return encoded, 0
        room = self.context - max_new_tokens
        if room < 1:
            raise ConfigError(
                f"sampling.max_new_tokens {max_new_tokens} leaves no room for a prompt in a context of {self.context} tokens; lower it"
            )
        kept = [e for e in encoded if len(e.tokens) <= room]
        if len(kept) < len(encoded) and self.config.overlong == "error":
            worst = max(encoded, key=lambda e: len(e.tokens))
            raise DataError(
                f"prompt {worst.prompt.id} has {len(worst.tokens)} tokens, but context {self.context} - max_new_tokens {max_new_tokens} "
                f"= {room}; shorten it, lower sampling.max_new_tokens, or set rollout.overlong=drop"
            )
        return kept, len(encoded) - len(kept)


def is_chat(content: Any) -> bool:
    """Whether a value is a non-empty list of chat messages."""
    return isinstance(content, list) and bool(content) and all(isinstance(m, dict) and "role" in m and "content" in m for m in content)


def _limits(model: str, tokenizer: Any) -> tuple[int | None, int | None]:
    """The model's longest sequence in tokens and the size of its vocabulary; None where nothing says. Raises DataError."""
    try:
        config = AutoConfig.from_pretrained(model).get_text_config()
    except (OSError, ValueError, KeyError) as error:
        why = " ".join(str(error).split())[:200]
        raise DataError(f"policy.model {model!r}: config.json cannot be used ({why}); give a Hugging Face folder") from error
    context = getattr(config, "max_position_embeddings", None)
    if context is None and tokenizer.model_max_length < NO_LIMIT:
        context = tokenizer.model_max_length
    return context, getattr(config, "vocab_size", None)
