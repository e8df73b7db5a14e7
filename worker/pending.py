"""A step's result on its way from the device to the host."""

from __future__ import annotations

import torch

from paceline.coordinator.messages import StepResult, TokenLogprobs
from paceline.worker.batch_state import HostRows
from paceline.worker.prompt_scorer import PromptScores
from paceline.worker.sampler import SampledLogprobs


class PendingResult:
    """What a step sampled, being copied to the host.

    On a GPU the copies go to pinned memory on a side stream, so that they neither wait for nor hold up the next step.
    """

    def __init__(
        self,
        step: int,
        token_ids: torch.Tensor,
        logprobs: SampledLogprobs | None,
        scores: PromptScores | None,
        rows: HostRows,
        copy_stream: torch.cuda.Stream | None,
    ) -> None:
        """token_ids [R or more] on the device, of which those of the rows that sample count.

        copy_stream is None on the CPU, where results are there at once.
        """
        self._step = step
        self._sampled = rows.sampled
        self._rules = rows.sampling
        self._reported = None if logprobs is None else logprobs.rows
        self._scored = None if scores is None else scores.rows
        tensors = [token_ids]
        if logprobs is not None:
            tensors += [logprobs.chosen, logprobs.top_ids, logprobs.top]
        if scores is not None:
            tensors += [scores.chosen, scores.ranks, scores.top_ids, scores.top]
        self._event: torch.cuda.Event | None = None
        if copy_stream is not None:
            tensors = self._copy_out(tensors, copy_stream)
        self._tensors = tensors

    def _copy_out(self, tensors: list[torch.Tensor], stream: torch.cuda.Stream) -> list[torch.Tensor]:
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        copies = []
        with torch.cuda.stream(stream):
            for tensor in tensors:
                host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                host.copy_(tensor, non_blocking=True)
                tensor.record_stream(stream)
                copies.append(host)
            self._event = torch.cuda.Event()
            self._event.record(stream)
        return copies

    def ready(self) -> bool:
        """Whether result() returns without waiting."""
        return self._event is None or self._event.query()

    def result(self) -> StepResult:
        """The result, waited for where it is not there yet."""
        if self._event is not None:
            self._event.synchronize()
        all_ids, *rest = (tensor.tolist() for tensor in self._tensors)
        token_ids = [all_ids[row] for row in self._sampled]
        logprobs: list[TokenLogprobs | None] = []
        if self._reported is not None:
            chosen, top_ids, top, *rest = rest
            of_row = {
                row: TokenLogprobs(chosen[index], top_ids[index][:count], top[index][:count])
                for index, row in enumerate(self._reported)
                for count in (self._rules[row].logprobs,)
            }
            logprobs = [of_row.get(row) for row in self._sampled]
        prompt_logprobs: list[TokenLogprobs] = []
        if self._scored is not None:
            counts = [row.top for row in self._scored for _ in range(row.number)]
            prompt_logprobs = [
                TokenLogprobs(chosen, top_ids[:count], top[:count], rank)
                for chosen, rank, top_ids, top, count in zip(*rest, counts, strict=True)
            ]
        return StepResult(self._step, token_ids, logprobs, prompt_logprobs)
