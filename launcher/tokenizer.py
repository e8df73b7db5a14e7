"""Text to token ids: plain prompts and chat messages."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.coordinator.errors import InputError
from paceline.launcher.control_tokens import ControlTokens
from paceline.launcher.encoder import Encoder
from paceline.worker.json_files import read_json

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")

Message = Mapping[str, Any]


def read_tokenizer_config(folder: Path) -> dict[str, Any]:
    """The object in tokenizer_config.json, empty where there is no such file. Raises InputError as read_json."""
    path = folder / "tokenizer_config.json"
    return read_json(path) if path.exists() else {}


class Tokenizer:
    """A checkpoint's tokenizer. A folder without one still serves prompts given as token ids."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.backend: Any = None
        """The transformers tokenizer, or None."""
        self._encoder: Any = None
        self._control: Any = None
        if any((folder / name).exists() for name in TOKENIZER_FILES):
            # Only here: nobody else needs it, and of what is imported without a GPU only torch takes longer.
            from transformers import AutoTokenizer

            try:
                self.backend = AutoTokenizer.from_pretrained(
                    folder,
                    config=_model_config(folder),
                    local_files_only=True,
                    trust_remote_code=False,  # unset, transformers asks at the terminal whether to run a folder's code
                    clean_up_tokenization_spaces=False,
                    model_max_length=sys.maxsize,  # how long prompts may be is said by the engine, in words of its own
                )
            except InputError:  # it names the file
                raise
            except Exception as error:  # transformers looks into the files without checking them first
                words = " ".join(f"{type(error).__name__}: {error}".split())
                if "trust_remote_code" in words:
                    words = "it is code of its own, which is never run; it has to be one that transformers has"
                raise InputError(f"the tokenizer in {folder} cannot be read: {words}") from error
            self._encoder = Encoder(self.backend)
            self._control = ControlTokens(self.backend)

    def encode(self, text: str) -> list[int]:
        """Token ids of a plain prompt, with the special tokens that the tokenizer itself adds.

        A text that begins with BOS, as rendered conversations do, gets no second one.
        """
        tokenizer = self._require()
        token_ids: list[int] = self._encoder.encode(_checked(text), add_special_tokens=True)
        if len(token_ids) > 1 and token_ids[0] == token_ids[1] == tokenizer.bos_token_id:
            del token_ids[0]
        return token_ids

    def encode_chat(self, messages: Sequence[Message], **template_options: Any) -> list[int]:
        """Token ids of a conversation through the checkpoint's chat template, ready for the assistant's answer.

        The template writes every special token itself, so none is added, and those that the messages hold are plain
        text. Raises InputError where there is no template or it refuses the messages.
        """
        return self.encode_rendered(self.render_chat(messages, **template_options))

    def render_chat(self, messages: Sequence[Message], **template_options: Any) -> str:
        """The conversation as the chat template writes it, for encode_rendered. Raises InputError as encode_chat."""
        tokenizer = self._require()
        if not tokenizer.chat_template:
            raise InputError(f"the model in {self._folder} has no chat template; use a raw prompt (--raw)")
        try:
            text: str = tokenizer.apply_chat_template(
                self._control.guarded(list(messages)),
                tokenize=False,
                add_generation_prompt=True,
                **self._control.guarded(template_options),
            )
        except Exception as error:  # a template is a program of the checkpoint's author and may raise anything
            raise InputError(f"the chat template cannot render these messages: {error}") from error
        return _checked(text)

    def encode_rendered(self, text: str) -> list[int]:
        """Token ids of what render_chat gave."""
        self._require()
        token_ids: list[int] = self._control.encode(text)
        return token_ids

    def template_variables(self) -> frozenset[str] | None:
        """Names of the variables that the chat template reads; None where that cannot be told."""
        from paceline.launcher.chat_template import template_variables

        try:
            return template_variables(self._require().get_chat_template())
        except ValueError:  # several templates, and none of them the default
            return None

    def chat_template(self, *, with_tools: bool = False) -> str:
        """The chat template's source, "" where there is none; some checkpoints have another one for tools."""
        if not self.has_chat_template:
            return ""
        try:
            return str(self.backend.get_chat_template(tools=[{}] if with_tools else None))
        except ValueError as error:  # several templates, and none of them the default
            raise InputError(f"the model in {self._folder} has no default chat template: {error}") from error

    @property
    def added_tokens(self) -> dict[str, int]:
        """Ids of the tokens beside the vocabulary's own, special ones among them."""
        return {} if self.backend is None else dict(self.backend.get_added_vocab())

    @property
    def has_chat_template(self) -> bool:
        """Whether encode_chat works."""
        return self.backend is not None and bool(self.backend.chat_template)

    @property
    def end_ids(self) -> tuple[int, ...]:
        """The tokenizer's own end-of-text id, where it has one."""
        if self.backend is None or self.backend.eos_token_id is None:
            return ()
        return (int(self.backend.eos_token_id),)

    def _require(self) -> Any:
        if self.backend is None:
            raise InputError(
                f"{self._folder} has no tokenizer: prompts can be token ids alone, from Python or over HTTP"
            )
        return self.backend


def _model_config(folder: Path) -> Any:
    """The model's config for AutoTokenizer; None where that must read it itself, since the tokenizer names no class.

    Of the config it takes a few fields. Left to itself it reads them into the model family's own class, with which it
    imports torch's compiler, for about as long as all else that a tokenizer takes.
    """
    config_path = folder / "config.json"
    fields = read_tokenizer_config(folder)
    if not fields.get("tokenizer_class") or "auto_map" in fields or not config_path.exists():
        return None
    from transformers import PreTrainedConfig

    return PreTrainedConfig.from_dict(read_json(config_path))


def _checked(text: str) -> str:
    """The text, unless it holds half characters, as command-line arguments that are no UTF-8 do."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"the prompt is no valid Unicode text at character {error.start}") from error
    return text
