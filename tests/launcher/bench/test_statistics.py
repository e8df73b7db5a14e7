"""The arithmetic of a run, by hand: no server, no clock."""

from __future__ import annotations

import json
from typing import Any

import numpy
import pytest

from paceline.launcher.bench.plan import PlannedRequest
from paceline.launcher.bench.records import RequestRecord, even_shares
from paceline.launcher.bench.statistics import latencies, percentile, summarise, summary, token_gaps


def record(
    *events: tuple[float, dict[str, Any] | str], sent: float = 0.0, due: float = 0.0, asked: int = 4
) -> RequestRecord:
    """Of a request whose events came at these times; it ended with the last."""
    made = RequestRecord(PlannedRequest(0, due, 10, asked))
    made.sent = sent
    for time, event in events:
        made.feed(f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n".encode(), time)
        made.ended = time
    return made


def text(so_far: int | None = None, words: str = "w") -> dict[str, Any]:
    event: dict[str, Any] = {"choices": [{"text": words}]}
    return event if so_far is None else event | {"usage": usage(so_far)}


def usage(tokens: int, cached: int | None = None) -> dict[str, Any]:
    details = {} if cached is None else {"prompt_tokens_details": {"cached_tokens": cached}}
    return {"prompt_tokens": 10, "completion_tokens": tokens, **details}


def final(tokens: int, cached: int | None = None) -> dict[str, Any]:
    return {"choices": [], "usage": usage(tokens, cached)}


@pytest.mark.parametrize("values", [[3.0], [1.0, 2.0], [5.0, 1.0, 4.0, 2.5], [float(n * n % 17) for n in range(40)]])
def test_percentiles_are_numpys(values: list[float]) -> None:
    for q in (0, 1, 50, 90, 95, 99, 100):
        assert percentile(sorted(values), q) == pytest.approx(numpy.percentile(values, q), abs=1e-12)
    assert summary(values).max == max(values)
    assert summary(values).mean == pytest.approx(numpy.mean(values))
    assert summary([]).count == 0


def test_an_event_of_several_tokens_counts_as_several() -> None:
    assert token_gaps([1.0, 2.0, 5.0], [2, 1, 3]) == [0.0, 1.0, 1.0, 1.0, 1.0]
    assert token_gaps([1.0, 2.0, 3.0], [1, 0, 1]) == [2.0]
    assert token_gaps([], []) == []
    assert even_shares(7, 3) == [3, 2, 2]
    assert even_shares(2, 3) == [1, 1, 0]
    assert even_shares(5, 0) == []


def test_tokens_are_those_of_the_usage_and_not_events() -> None:
    exact = record((1.0, text(3)), (2.0, text(4)), (3.0, final(5)), (3.0, "[DONE]"))
    assert (exact.token_counts(), exact.tokens) == ([3, 1], 5)
    shared = record((1.0, text()), (2.0, text()), (3.0, final(5)), (3.0, "[DONE]"))
    assert (shared.token_counts(), shared.tokens) == ([3, 2], 5)
    untold = record((1.0, text()), (2.0, text()), (3.0, "[DONE]"))
    assert (untold.token_counts(), untold.tokens) == ([1, 1], 2)
    assert summarise([untold], {}, open_loop=True).counted_events
    assert not summarise([exact, shared], {}, open_loop=True).counted_events


def test_the_first_token_is_the_first_text() -> None:
    role = {"choices": [{"delta": {"role": "assistant", "content": ""}}]}
    torn = {"choices": [{"delta": {"content": ""}}], "usage": usage(1)}
    thought = {"choices": [{"delta": {"reasoning_content": "hm"}}], "usage": usage(2)}
    told = record((1.0, role), (2.0, torn), (3.0, thought), (4.0, final(2)), (4.0, "[DONE]"), sent=0.5)
    values = latencies(told)
    assert values is not None
    assert (values.ttft, values.e2e, told.token_counts()) == (2.5, 3.5, [2])
    silent = latencies(record((4.0, final(2)), (4.0, "[DONE]"), sent=0.5))
    assert silent is not None
    assert (silent.ttft, silent.itl, silent.gaps) == (3.5, 0.0, [])


def test_bytes_may_be_cut_anywhere() -> None:
    stream = f"data: {json.dumps(text(1))}\r\n\r\n: comment\n\ndata:{json.dumps(final(2))}\n\ndata: [DONE]\n\n".encode()
    for size in (1, 2, 7, 1000):
        made = RequestRecord(PlannedRequest(0, 0.0, 10, 2))
        for place in range(0, len(stream), size):
            made.feed(stream[place : place + size], float(place))
        assert (made.done, made.tokens, len(made.times)) == (True, 2, 1)


def test_goodput_counts_answers_that_keep_to_all_limits() -> None:
    def answer(first: float, step: float) -> RequestRecord:
        return record((first, text(1)), (first + step, text(2)), (first + 2 * step, text(3)), (9.0, "[DONE]"), asked=3)

    records = [answer(0.4, 0.04), answer(0.4, 0.06), answer(0.6, 0.04), answer(0.5, 0.05)]
    failed = record((0.1, text(1)), (10.0, {"error": {"code": "engine_failed"}}))
    figures = summarise([*records, failed], {"ttft": 0.5, "itl": 0.0501}, open_loop=True)
    assert (figures.good, figures.seconds, figures.goodput) == (2, 10.0, 0.2)
    assert summarise(records, {}, open_loop=True).goodput is None
    assert summarise(records, {"e2e": 8.9}, open_loop=True).good == 0


def test_what_failed_or_never_ended_is_in_no_latency_but_its_tokens_came() -> None:
    whole = record((1.0, text(1)), (2.0, text(4)), (2.0, final(4, cached=5)), (2.0, "[DONE]"))
    failed = record((1.0, text(2)), (4.0, {"error": {"code": "engine_failed"}}))
    cut = record((1.0, text(3)))
    cut.ended = None
    refused = record()
    refused.error, refused.ended = "HTTP 429 queue_full", 0.5
    never = RequestRecord(PlannedRequest(9, 5.0, 10, 4))
    figures = summarise([whole, failed, cut, refused, never], {}, open_loop=True)
    assert (figures.planned, figures.sent, figures.answered, figures.unfinished) == (5, 4, 1, 1)
    assert figures.errors == {"error in the stream (engine_failed)": 1, "HTTP 429 queue_full": 1}
    assert (figures.output_tokens, figures.prompt_tokens, figures.seconds) == (4 + 2 + 3, 30, 4.0)
    assert figures.ttft.count == 1
    assert figures.itl.count == 3
    assert figures.cached_share == 5 / 30
    assert figures.short_answers == 0


def test_late_sends_are_told_of_an_open_loop() -> None:
    records = [record((2.0, "[DONE]"), sent=sent, due=due) for sent, due in ((0.0, 0.0), (1.5, 1.0))]
    late = summarise(records, {}, open_loop=True).late
    assert (late.count, late.mean, late.max) == (2, 0.25, 0.5)
    assert summarise(records, {}, open_loop=False).late.count == 0


def test_short_answers_are_told() -> None:
    short = record((1.0, text(2)), (2.0, "[DONE]"), asked=3)
    assert summarise([short], {}, open_loop=True).short_answers == 1
