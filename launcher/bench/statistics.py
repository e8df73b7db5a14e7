"""From the records of a run to its figures. Plain arithmetic: no clock, no server."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from paceline.launcher.bench.records import RequestRecord

PERCENTILES = (50, 90, 95, 99)
SLO_NAMES = ("ttft", "itl", "e2e")


@dataclass(frozen=True, slots=True)
class Summary:
    """Some values, in seconds; all None where there are none."""

    count: int
    mean: float | None = None
    percentiles: Mapping[int, float] = field(default_factory=dict)
    max: float | None = None

    def as_json(self) -> dict[str, float | int | None]:
        """In milliseconds, rounded to a microsecond."""
        values = {"mean": self.mean, **{f"p{q}": value for q, value in self.percentiles.items()}, "max": self.max}
        return {"count": self.count, **{name: _ms(value) for name, value in values.items()}}


def percentile(ordered: Sequence[float], q: float) -> float:
    """The q-th percentile of values in rising order, linear between neighbours, as numpy's default."""
    place = (len(ordered) - 1) * q / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def summary(values: Sequence[float]) -> Summary:
    """Of values in any order."""
    if not values:
        return Summary(0)
    ordered = sorted(values)
    mean = sum(ordered) / len(ordered)
    return Summary(len(ordered), mean, {q: percentile(ordered, q) for q in PERCENTILES}, ordered[-1])


def token_gaps(times: Sequence[float], counts: Sequence[int]) -> list[float]:
    """Seconds between one token and the next, one value for each token but the first.

    An event of k tokens counts as k: each has a k-th of the time since the event before. Those that came with the very
    first token have 0. The time of an event of no tokens falls to the next one.
    """
    gaps: list[float] = []
    before: float | None = None
    for time, count in zip(times, counts, strict=True):
        if count == 0:
            continue
        if before is None:
            gaps += [0.0] * (count - 1)
        else:
            gaps += [(time - before) / count] * count
        before = time
    return gaps


@dataclass(frozen=True, slots=True)
class Latencies:
    """Of one whole answer, in seconds after its request was sent."""

    ttft: float
    itl: float
    """Mean time between tokens; 0 for an answer of one token."""
    e2e: float
    gaps: Sequence[float]
    """Seconds between one token and the next, as token_gaps has them."""


def latencies(record: RequestRecord) -> Latencies | None:
    """None of a request that was not answered as a whole."""
    if not record.ok or record.sent is None or record.first is None or record.ended is None:
        return None
    gaps = token_gaps(record.times, record.token_counts())
    mean = sum(gaps) / len(gaps) if gaps else 0.0
    return Latencies(record.first - record.sent, mean, record.ended - record.sent, gaps)


def meets(values: Latencies, slo: Mapping[str, float]) -> bool:
    """Whether a request kept to every limit (seconds, under SLO_NAMES)."""
    return all(getattr(values, name) <= limit for name, limit in slo.items())


@dataclass(frozen=True, slots=True)
class Figures:
    """What a run comes to. Times in seconds; rates a second of the run, from its start to its last answer's end."""

    seconds: float
    planned: int
    sent: int
    answered: int
    errors: Mapping[str, int]
    unfinished: int
    """Sent, and neither answered nor failed when the run was ended."""
    ttft: Summary
    itl: Summary
    e2e: Summary
    late: Summary
    """How long after their time requests were sent: the client's own doing."""
    prompt_tokens: int
    output_tokens: int
    cached_share: float | None
    """Of the prompt tokens; None where the server does not say."""
    short_answers: int
    """Whole answers with fewer tokens than were asked for."""
    planned_prompt_tokens: int
    """Of the requests whose prompt_tokens the server has told."""
    good: int | None
    """Answers within the SLO, where there is one."""
    counted_events: bool
    """Whether any answer's tokens are its events, since the server sent no usage."""

    @property
    def request_rate(self) -> float:
        """Answers a second."""
        return self._rate(self.answered)

    def _rate(self, number: int) -> float:
        return number / self.seconds if self.seconds > 0 else 0.0

    @property
    def output_rate(self) -> float:
        """Output tokens a second."""
        return self._rate(self.output_tokens)

    @property
    def prompt_rate(self) -> float:
        """Prompt tokens a second, those found in a cache included."""
        return self._rate(self.prompt_tokens)

    @property
    def goodput(self) -> float | None:
        """Answers within the SLO, a second."""
        return None if self.good is None else self._rate(self.good)


def summarise(records: Sequence[RequestRecord], slo: Mapping[str, float], *, open_loop: bool) -> Figures:
    """The figures of a run's records, of requests that were never sent too."""
    sent = [record for record in records if record.sent is not None]
    whole = [(record, values) for record in sent if (values := latencies(record)) is not None]
    told = [record for record in sent if record.prompt_tokens is not None]
    prompt_tokens = sum(record.prompt_tokens or 0 for record in told)
    cached = [record.cached_tokens for record in told if record.cached_tokens is not None]
    return Figures(
        seconds=max((max(record.ended or 0.0, *record.times[-1:], 0.0) for record in sent), default=0.0),
        planned=len(records),
        sent=len(sent),
        answered=len(whole),
        errors=dict(Counter(record.error for record in sent if record.error is not None).most_common()),
        unfinished=sum(record.ended is None for record in sent),
        ttft=summary([values.ttft for _, values in whole]),
        itl=summary([gap for _, values in whole for gap in values.gaps]),
        e2e=summary([values.e2e for _, values in whole]),
        late=summary([(record.sent or 0.0) - record.plan.due for record in sent] if open_loop else []),
        prompt_tokens=prompt_tokens,
        output_tokens=sum(record.tokens for record in sent),
        cached_share=sum(cached) / prompt_tokens if cached and prompt_tokens else None,
        short_answers=sum(record.tokens < record.plan.output_tokens for record, _ in whole),
        planned_prompt_tokens=sum(record.plan.prompt_tokens for record in told),
        good=sum(meets(values, slo) for _, values in whole) if slo else None,
        counted_events=any(record.completion_tokens is None and record.times for record in sent),
    )


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)
