"""The Python API: one object that loads a model over the ranks and answers prompts."""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any

from tqdm import tqdm

from paceline.coordinator.checks import is_int
from paceline.coordinator.errors import InputError
from paceline.coordinator.sampling_params import SamplingParams
from paceline.launcher.engine import ChoiceUpdate, make_config, start_engine
from paceline.launcher.outputs import CompletionOutput, RequestOutput, StreamChunk
from paceline.launcher.sampling_defaults import read_sampling_defaults
from paceline.launcher.tokenizer import Message

__all__ = ["LLM", "CompletionOutput", "RequestOutput", "StreamChunk"]

Prompt = str | Sequence[int]
"""A text, or token ids."""

_News = tuple[RequestOutput, CompletionOutput, ChoiceUpdate]


class LLM:
    """A model, loaded once, over one or more ranks.

    In a plain script it runs on one GPU or the CPU. Under `torchrun --nproc-per-node N` the same script splits the
    model over N ranks. Rank 0 goes on with the script; the others work inside this constructor until rank 0 closes
    the engine or ends, and then leave the script, so that its output appears once. One LLM a script.

    Threads may share it: what each asks runs in the same steps.
    """

    def __init__(
        self, model: str | os.PathLike[str] | None = None, *, tensor_parallel_size: int | None = None, **settings: Any
    ) -> None:
        """Load a model.

        Args:
            model: a folder, a hub id, or None for the default model (SmolLM2-135M-Instruct).
            tensor_parallel_size: ranks to split over; None takes as many as torchrun started.
            settings: any other field of paceline.coordinator.config.EngineConfig (dtype, max_model_len, …).

        Raises:
            InputError: a setting, the checkpoint or the ranks do not fit; on every rank, with the same message.
        """
        self.engine = start_engine(make_config(model, tensor_parallel_size, settings))
        # The second one lets its own thread in again: Ctrl-C may come between its being taken and the `try`.
        self._turn, self._lock = threading.Lock(), threading.RLock()
        self._outputs: dict[str, tuple[RequestOutput, int]] = {}
        self._streams: weakref.WeakSet[AnswerStream] = weakref.WeakSet()
        """Whoever makes a step leaves its news with all of them."""
        self._abandoned: deque[RequestOutput] = deque()
        """Of streams that nobody reads any more."""

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer prompts (texts or token ids), batched together; results in the order of the prompts.

        Args:
            prompts: one prompt or several.
            sampling_params: one for all, or one a prompt; by default what `get_default_sampling_params` gives.
            use_tqdm: show a progress bar with tokens per second where the work takes more than a second.

        Raises:
            InputError: a prompt or its parameters cannot be run; then none of them is.
            EngineError: a rank failed.
        """
        texts, ids = self._encode(_as_list(prompts))
        return self._run(texts, ids, sampling_params, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several, through the model's chat template; otherwise as generate()."""
        ids = [self.engine.tokenizer.encode_chat(each, **template_options) for each in _as_conversations(messages)]
        return self._run([None] * len(ids), ids, sampling_params, use_tqdm)

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> AnswerStream:
        """Iterate over pieces of the answers as they come, those of all prompts mixed; otherwise as generate().

        The requests run from now on. Closing the stream, or dropping it (leaving the loop), aborts what still runs.
        """
        texts, ids = self._encode(_as_list(prompts))
        with self._exclusively():
            return AnswerStream(self, self._add(texts, ids, sampling_params))

    def get_default_sampling_params(self) -> SamplingParams:
        """SamplingParams with what the model's generation_config.json says of sampling, as in vLLM.

        Raises InputError, which names the file and the field, for a value that cannot be.
        """
        return self._default_sampling_params

    @cached_property
    def _default_sampling_params(self) -> SamplingParams:
        return SamplingParams(**read_sampling_defaults(Path(self.engine.config.model)))

    @contextmanager
    def _exclusively(self) -> Iterator[None]:
        """No other thread is in the engine meanwhile; not to be nested.

        Whoever waits holds the turn, so that a thread which makes step after step comes after it.
        """
        with self._turn:
            self._lock.acquire()
        try:
            yield
        finally:
            self._lock.release()

    def _run(
        self,
        texts: Sequence[str | None],
        ids: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        with self._exclusively():
            outputs = self._add(texts, ids, params)
        bar = tqdm(
            total=sum(len(output.outputs) for output in outputs),
            unit="answer",
            delay=1.0,
            disable=not use_tqdm or not sys.stderr.isatty(),
        )
        tokens = 0
        try:
            while not all(output.finished for output in outputs):
                for _, choice, update in self._step():
                    tokens += len(update.token_ids)
                    if choice.finish_reason is not None:
                        bar.update()
                elapsed = bar.format_dict["elapsed"]
                bar.set_postfix_str(f"{tokens / elapsed:.0f} tok/s" if elapsed > 0 else "", refresh=False)
        finally:
            bar.close()
            self._drop(outputs)
        return outputs

    def _add(
        self,
        texts: Sequence[str | None],
        ids: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[RequestOutput]:
        """Queue all prompts or, where one is refused, none. Within _exclusively."""
        per_prompt = _one_each(self.get_default_sampling_params() if params is None else params, len(ids))
        outputs: list[RequestOutput] = []
        try:
            for index, (text, token_ids, each) in enumerate(zip(texts, ids, per_prompt, strict=True)):
                try:
                    request_ids = self.engine.add(token_ids, each)
                except InputError as error:
                    raise InputError(f"prompt {index}: {error}" if len(ids) > 1 else str(error)) from error
                choices = [
                    CompletionOutput(number, logprobs=None if each.logprobs is None else [])
                    for number in range(len(request_ids))
                ]
                output = RequestOutput(request_ids[0], text, token_ids, choices)
                if each.prompt_logprobs is not None:
                    output.prompt_logprobs = [None]
                outputs.append(output)
                for number, request_id in enumerate(request_ids):
                    self._outputs[request_id] = (output, number)
        except BaseException:
            self._forget(outputs)
            raise
        return outputs

    def _step(self) -> list[_News]:
        """One step of the engine, its news already added to the outputs; those of other threads' requests, too."""
        with self._exclusively():
            return self._make_step()

    def _make_step(self) -> list[_News]:
        if self._abandoned:
            self._forget([self._abandoned.popleft() for _ in range(len(self._abandoned))])
        news: list[_News] = []
        for update in self.engine.step():
            output, number = self._outputs[update.request_id]
            choice = output.outputs[number]
            choice.text += update.text
            choice.token_ids.extend(update.token_ids)
            if choice.logprobs is not None:
                choice.logprobs.extend(update.logprobs)
            choice.stop_reason = update.stop_reason
            choice.timings = update.timings
            choice.error = update.error
            if number == 0:
                output.cached_tokens = update.cached_tokens
                if output.prompt_logprobs is not None:
                    output.prompt_logprobs.extend(update.prompt_logprobs)
            choice.finish_reason = update.finish_reason
            news.append((output, choice, update))
            if update.finish_reason is not None:
                del self._outputs[update.request_id]
        for stream in self._streams:
            stream.inbox.extend(news)
        return news

    def _drop(self, outputs: list[RequestOutput]) -> None:
        """Forget outputs, and abort what still runs of them."""
        with self._exclusively():
            self._forget(outputs)

    def _forget(self, outputs: list[RequestOutput]) -> None:
        dropped = {id(output) for output in outputs}
        unfinished = [request_id for request_id, (output, _) in self._outputs.items() if id(output) in dropped]
        self.engine.abort(unfinished)
        for request_id in unfinished:
            del self._outputs[request_id]

    def _encode(self, prompts: Sequence[Prompt]) -> tuple[list[str | None], list[Sequence[int]]]:
        texts: list[str | None] = []
        ids: list[Sequence[int]] = []
        for prompt in prompts:
            if isinstance(prompt, str):
                texts.append(prompt)
                ids.append(self.engine.tokenizer.encode(prompt))
            else:
                texts.append(None)
                ids.append(prompt)
        return texts, ids

    def close(self) -> None:
        """End the engine on all ranks. Also done at the end of a `with LLM(…) as llm:` block and of the process."""
        with self._exclusively():
            self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._exclusively():
            self.engine.close("" if error is None else str(error) or type(error).__name__)


class AnswerStream(Iterator[StreamChunk]):
    """Pieces of the answers to some prompts, as `LLM.stream` gives them."""

    def __init__(self, llm: LLM, outputs: list[RequestOutput]) -> None:
        self.inbox: deque[_News] = deque()
        """News of any request that was not looked at yet."""
        self._llm = llm
        self._outputs = outputs
        self._place = {id(output): index for index, output in enumerate(outputs)}
        llm._streams.add(self)

    def __next__(self) -> StreamChunk:
        while True:
            while self.inbox:
                output, choice, update = self.inbox.popleft()
                index = self._place.get(id(output))
                if index is not None:
                    return StreamChunk(index, choice.index, update.text, update.token_ids, update.finish_reason)
            if all(output.finished for output in self._outputs):
                raise StopIteration
            self._llm._step()

    def close(self) -> None:
        """Abort what still runs; the stream ends."""
        self.inbox.clear()
        self._llm._drop(self._outputs)
        self._outputs = []

    def __del__(self) -> None:
        # The collector may run this in the middle of a step, so the requests are only left to be dropped by the next.
        self._llm._abandoned.extend(self._outputs)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Several prompts as a list; a text or a flat sequence of token ids is one prompt."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise InputError(f"prompts must be a text, token ids, or a list of them, got {prompts!r}")
    items = list(prompts)
    if items and all(map(is_int, items)):
        return [items]  # type: ignore[list-item]
    for index, item in enumerate(items):
        if not isinstance(item, (str, Sequence)):
            raise InputError(f"prompt {index} must be a text or token ids, got {item!r}")
    return items  # type: ignore[return-value]


def _as_conversations(messages: Sequence[Any]) -> list[Sequence[Message]]:
    """Several conversations as a list; a flat sequence of messages is one conversation."""
    items = list(messages)
    return [items] if items and isinstance(items[0], dict) else items


def _one_each(params: SamplingParams | Sequence[SamplingParams], count: int) -> list[SamplingParams]:
    if isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise InputError(f"{len(params)} sampling parameters were given for {count} prompts; give one, or one a prompt")
    return list(params)
