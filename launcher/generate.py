"""The `generate` command: answer prompts from the command line."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.coordinator.errors import InputError
from paceline.coordinator.sampling_params import SamplingParams
from paceline.launcher.options import (
    ENGINE_FLAGS,
    SAMPLING_FLAGS,
    add_engine_options,
    add_sampling_options,
    engine_settings,
    errors_name_options,
    sampling_params,
)
from paceline.launcher.outputs import CompletionOutput, RequestOutput

DEFAULT_PROMPT = "What is the capital of France?"


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the command to the program's parser."""
    parser = commands.add_parser("generate", help="answer prompts and exit")
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help=f'default: "{DEFAULT_PROMPT}"')
    parser.add_argument("--prompt-file", type=Path, metavar="FILE", help="more prompts, one a line")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument(
        "--chat", action="store_true", help="a prompt is a user's message (default where there is a template)"
    )
    kind.add_argument("--raw", action="store_true", help="a prompt is a text to go on with")
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--stream", action="store_true", help="show the text as it comes")
    output.add_argument("--json", action="store_true", help="one JSON object a prompt")
    add_engine_options(parser)
    add_sampling_options(parser)
    parser.set_defaults(run=run)


@errors_name_options(ENGINE_FLAGS | SAMPLING_FLAGS)
def run(arguments: argparse.Namespace) -> None:
    """Answer the prompts; on ranks other than 0 this ends the process when rank 0 is done."""
    prompts = _prompts(arguments)
    params = sampling_params(arguments)
    for option, wish in (("--logprobs", params.logprobs), ("--prompt-logprobs", params.prompt_logprobs)):
        if wish is not None and not arguments.json:
            raise InputError(f"{option} needs --json, which shows them")
    from paceline.launcher.llm import LLM

    with LLM(arguments.model, tensor_parallel_size=arguments.tensor_parallel_size, **engine_settings(arguments)) as llm:
        tokenizer = llm.engine.tokenizer
        chat = arguments.chat or (not arguments.raw and tokenizer.has_chat_template)
        if chat:
            ids = [tokenizer.encode_chat([{"role": "user", "content": prompt}]) for prompt in prompts]
        else:
            ids = [tokenizer.encode(prompt) for prompt in prompts]
        if arguments.stream:
            _stream(llm, prompts, ids, params)
            return
        for prompt, output in zip(prompts, llm.generate(ids, params), strict=True):
            if arguments.json:
                for choice in output.outputs:
                    print(json.dumps(_record(prompt, output, choice), ensure_ascii=False))
            else:
                _print_heading(prompt, len(prompts))
                print("\n---\n".join(choice.text for choice in output.outputs))


def _prompts(arguments: argparse.Namespace) -> list[str]:
    prompts: list[str] = list(arguments.prompts)
    if arguments.prompt_file is not None:
        try:
            text = arguments.prompt_file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"--prompt-file {arguments.prompt_file} cannot be read: {error}") from error
        prompts += [line for line in text.splitlines() if line.strip()]
        if not prompts:
            raise InputError(f"--prompt-file {arguments.prompt_file} holds no prompt")
    if not prompts:
        prompts = [DEFAULT_PROMPT]
    for index, prompt in enumerate(prompts):
        if not prompt.strip():
            raise InputError(f"prompt {index} is empty; give a text")
    return prompts


def _stream(llm: Any, prompts: Sequence[str], ids: Sequence[Sequence[int]], params: SamplingParams) -> None:
    """Print the answers one after the other, each as far as it has come; later ones are held until their turn."""
    turns = [(prompt, choice) for prompt in range(len(prompts)) for choice in range(params.n)]
    held = dict.fromkeys(turns, "")
    finished: set[tuple[int, int]] = set()
    current = 0
    shown = -1
    for chunk in llm.stream(list(ids), params):
        turn = (chunk.prompt_index, chunk.index)
        held[turn] += chunk.text
        if chunk.finish_reason is not None:
            finished.add(turn)
        while current < len(turns):
            if shown < current:
                _print_heading(prompts[turns[current][0]], len(turns))
                shown = current
            sys.stdout.write(held[turns[current]])
            sys.stdout.flush()
            held[turns[current]] = ""
            if turns[current] not in finished:
                break
            print()
            current += 1


def _print_heading(prompt: str, count: int) -> None:
    if count > 1:
        print(f"### {prompt}")


def _record(prompt: str, output: RequestOutput, choice: CompletionOutput) -> dict[str, Any]:
    record: dict[str, Any] = {
        "prompt": prompt,
        "prompt_token_ids": list(output.prompt_token_ids),
        "token_ids": choice.token_ids,
        "text": choice.text,
        "finish_reason": choice.finish_reason,
        "cached_tokens": output.cached_tokens,
    }
    if len(output.outputs) > 1:
        record["index"] = choice.index
    for name, logprobs in (("logprobs", choice.logprobs), ("prompt_logprobs", output.prompt_logprobs)):
        if logprobs is not None:
            record[name] = [each and each.chosen for each in logprobs]
            if any(each and each.top_ids for each in logprobs):
                record[f"top_{name}"] = [
                    each and dict(zip(map(str, each.top_ids), each.top, strict=True)) for each in logprobs
                ]
    return record
