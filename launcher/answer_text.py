"""The text of one answer while its tokens come in."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.coordinator.sampling_params import SamplingParams
from paceline.launcher.detokenizer import Detokenizer
from paceline.launcher.stop_strings import StopStrings
from paceline.launcher.tokenizer import Tokenizer


class AnswerText:
    """Turns an answer's token ids into text that is safe to show, and watches for its stop texts.

    As in vLLM, stop texts count only once min_tokens are there, and the text of a stop token that ended the answer is
    left out unless include_stop_str_in_output. Without a tokenizer there is no text.
    """

    __slots__ = ("_detokenizer", "_num_tokens", "_params", "_stop_strings", "stop_text")

    def __init__(
        self, tokenizer: Tokenizer, params: SamplingParams, *, shown_ids: frozenset[int] = frozenset()
    ) -> None:
        """shown_ids: special tokens that are part of the text even where such are left out."""
        self._params = params
        self._num_tokens = 0
        self._detokenizer = None
        if tokenizer.backend is not None:
            self._detokenizer = Detokenizer(
                tokenizer.backend, skip_special_tokens=params.skip_special_tokens, shown_ids=shown_ids
            )
        self._stop_strings = None
        if params.stop:
            self._stop_strings = StopStrings(tuple(params.stop), params.include_stop_str_in_output)
        self.stop_text: str | None = None
        """The stop text that was met."""

    def stop_token(self, token_id: int | None) -> int | None:
        """The token id that ended the answer, where it is one of the caller's own stop_token_ids."""
        return token_id if token_id in self._params.stop_token_ids else None

    def feed(self, token_ids: Sequence[int], *, last: bool, stop_token: int | None) -> str:
        """New text of these further tokens; `last`: no more come, stop_token: the id that ended the answer."""
        if self._detokenizer is None or self.stop_text is not None:
            return ""
        self._num_tokens += len(token_ids)
        if stop_token is not None and self._is_left_out(stop_token):
            token_ids = token_ids[:-1]
        text = self._detokenizer.feed(token_ids)
        if last:
            text += self._detokenizer.finish()
        return text if self._stop_strings is None else self._until_stop(self._stop_strings, text, last=last)

    def _is_left_out(self, stop_token: int) -> bool:
        return self.stop_token(stop_token) is not None and not self._params.include_stop_str_in_output

    def _until_stop(self, stop_strings: StopStrings, text: str, *, last: bool) -> str:
        if self._num_tokens > self._params.min_tokens:
            text = stop_strings.feed(text)
            self.stop_text = stop_strings.matched
        if last and self.stop_text is None:
            text += stop_strings.finish()
        return text
