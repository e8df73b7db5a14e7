"""Command-line options of the engine and of sampling, each named after the field that it sets."""

from __future__ import annotations

import argparse
import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from paceline.coordinator.config import DEVICES, DTYPES, LOAD_FORMATS
from paceline.coordinator.errors import InputError
from paceline.coordinator.policies import POLICIES
from paceline.coordinator.sampling_params import SamplingParams


class OneLineParser(argparse.ArgumentParser):
    """A parser whose errors are one line, said by the caller: under torchrun every rank parses the same arguments."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message} (see {self.prog} --help)")


@dataclass(frozen=True)
class Option:
    """How one dataclass field is given on the command line."""

    field: str
    kind: Callable[[str], Any] | None
    """None: a switch."""
    help: str
    choices: tuple[str, ...] | None = None
    repeat: bool = False
    """May be given several times; the values are collected."""
    switch_off: bool = False
    """A switch that turns the field off, spelled --no-field."""
    metavar: str | None = None

    @property
    def flag(self) -> str:
        """The option's spelling."""
        return ("--no-" if self.switch_off else "--") + self.field.replace("_", "-")

    def add_to(self, parser: argparse._ArgumentGroup) -> None:
        """Add the option to a parser; left out on the command line, it is absent from the result."""
        common: dict[str, Any] = {"dest": self.field, "help": self.help, "default": argparse.SUPPRESS}
        if self.kind is None:
            parser.add_argument(self.flag, action="store_false" if self.switch_off else "store_true", **common)
        else:
            action = "append" if self.repeat else "store"
            parser.add_argument(
                self.flag, type=self.kind, action=action, choices=self.choices, metavar=self.metavar, **common
            )


ENGINE_OPTIONS = (
    Option("device", str, "where to run; auto takes a GPU where one is seen", choices=DEVICES),
    Option("dtype", str, "of weights, activations and cache; auto is the checkpoint's own", choices=DTYPES),
    Option("load_format", str, "dummy: seeded random weights", choices=LOAD_FORMATS),
    Option("max_model_len", int, "most tokens of one request (default: the model's own)"),
    Option("block_size", int, "tokens a cache block holds, a power of two (default 16)"),
    Option("num_blocks", int, "cache blocks a rank holds (default: what fits)"),
    Option("cache_memory_share", float, "share of memory for weights, workspace and cache (default 0.9; CPU 0.4)"),
    Option("max_num_seqs", int, "most requests running at once (default 256)"),
    Option("max_batched_tokens", int, "most tokens computed in one step (default 2048)"),
    Option("prefix_cache", None, "do not share the cache of equal prefixes", switch_off=True),
    Option("policy", str, "what a step's tokens go to first", choices=tuple(POLICIES)),
    Option("check_lockstep", None, "compare every step across ranks (slow, for debugging)"),
)


def logit_bias(text: str) -> tuple[int, float]:
    """One `ID:VALUE` pair of --logit-bias."""
    token, _, value = text.partition(":")
    try:
        return int(token), float(value)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be like 42:-5 (token id, value), got {text!r}") from error


SAMPLING_OPTIONS = (
    Option("n", int, "answers a prompt (default 1)"),
    Option("max_tokens", int, "most tokens of an answer (default 256)"),
    Option("min_tokens", int, "do not end before this many tokens"),
    Option("temperature", float, "0 always takes the most likely token (default 0)"),
    Option("top_k", int, "choose among the k most likely tokens; 0 is off"),
    Option("top_p", float, "choose among the most likely tokens of this total probability; 1 is off"),
    Option("min_p", float, "drop tokens below this share of the most likely one's probability"),
    Option("seed", int, "makes a sampled answer reproducible"),
    Option("repetition_penalty", float, "above 1: tokens of prompt and answer become less likely"),
    Option("presence_penalty", float, "taken from the logit of tokens that the answer holds"),
    Option("frequency_penalty", float, "the same, once per occurrence"),
    Option("logit_bias", logit_bias, "added to a token's logit; repeatable", repeat=True, metavar="ID:VALUE"),
    Option("stop", str, "text that ends the answer; repeatable", repeat=True),
    Option("stop_token_ids", int, "token id that ends the answer; repeatable", repeat=True, metavar="ID"),
    Option("include_stop_str_in_output", None, "leave the stop text in the answer"),
    Option("ignore_eos", None, "go on after the model's end-of-text token"),
    Option("logprobs", int, "report log-probabilities: of the chosen tokens (0) and of this many best ones"),
    Option("prompt_logprobs", int, "the same of the prompt's own tokens"),
    Option("grammar", str, "what the answer must follow: a grammar as llguidance reads it", metavar="TEXT"),
    Option("skip_special_tokens", None, "show special tokens in the text", switch_off=True),
)

ENGINE_FLAGS = {"tensor_parallel_size": "--tp"} | {option.field: option.flag for option in ENGINE_OPTIONS}
SAMPLING_FLAGS = {option.field: option.flag for option in SAMPLING_OPTIONS}


def add_engine_options(parser: argparse.ArgumentParser, *, model_option: bool = True) -> None:
    """Add --tp, the options of EngineConfig and, for a command that takes no model by place, --model."""
    group = parser.add_argument_group("engine")
    if model_option:
        group.add_argument("--model", help="folder or Hugging Face id (default: SmolLM2-135M-Instruct)")
    group.add_argument(
        "--tp", "--tensor-parallel-size", dest="tensor_parallel_size", type=int, metavar="N", help="ranks to split over"
    )
    for option in ENGINE_OPTIONS:
        option.add_to(group)


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of SamplingParams."""
    group = parser.add_argument_group("sampling")
    for option in SAMPLING_OPTIONS:
        option.add_to(group)


@contextlib.contextmanager
def errors_name_options(flags: Mapping[str, str]) -> Iterator[None]:
    """InputErrors name the options of the command line, and not the fields that they set; flags: by field."""
    try:
        yield
    except InputError as error:
        # Further on in a message, a field that is one word may be a word like any other.
        names = [rf"^{name}\b" for name in flags] + [rf"\b{name}\b" for name in flags if "_" in name]
        raise InputError(re.sub("|".join(names), lambda found: flags[found[0]], str(error))) from error


def engine_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """The engine settings given on the command line."""
    return {o.field: getattr(arguments, o.field) for o in ENGINE_OPTIONS if hasattr(arguments, o.field)}


def sampling_params(arguments: argparse.Namespace) -> SamplingParams:
    """The SamplingParams given on the command line; unlike the class, the command is greedy and answers at length."""
    values = {o.field: getattr(arguments, o.field) for o in SAMPLING_OPTIONS if hasattr(arguments, o.field)}
    if "logit_bias" in values:
        values["logit_bias"] = dict(values["logit_bias"])
    if values.get("min_tokens", 0) > 256:
        values.setdefault("max_tokens", None)
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 256, **values})
