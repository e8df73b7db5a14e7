"""What is to be sent: from real traces' first lines (Azure CC-BY 4.0, Mooncake Apache-2.0) and from seeds."""

from __future__ import annotations

import gzip
import itertools
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from paceline.coordinator.errors import InputError
from paceline.launcher.bench.plan import Lengths, PlannedRequest, poisson_arrivals, random_requests, trace_requests
from paceline.launcher.bench.prompts import PromptMaker, one_token_words
from paceline.launcher.bench.traces import read_trace
from paceline.launcher.bench.words import WORDS

TRACES = Path(__file__).parent / "traces"
AZURE = TRACES / "azure_conv_head.csv"
MOONCAKE = TRACES / "mooncake_conversation_head.jsonl"


def test_azures_rows() -> None:
    rows = list(read_trace(AZURE))
    assert [(row.prompt_tokens, row.output_tokens) for row in rows] == [
        (374, 44),
        (396, 109),
        (879, 55),
        (91, 16),
        (91, 16),
    ]
    assert [round(row.seconds, 6) for row in rows] == [0.0, 4.314579, 4.541877, 4.710427, 5.892655]
    assert rows[0].block_ids is None


def test_mooncakes_rows_zipped_or_not(tmp_path: Path) -> None:
    zipped = tmp_path / "trace.jsonl.gz"
    zipped.write_bytes(gzip.compress(MOONCAKE.read_bytes()))
    rows = list(read_trace(MOONCAKE))
    assert list(read_trace(zipped)) == rows
    assert [(row.seconds, row.prompt_tokens, row.output_tokens) for row in rows[::3]] == [
        (0, 6758, 500),
        (0, 2290, 316),
    ]
    assert rows[3].block_ids == (0, 42, 43, 44, 45)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("a,b\n1,2\n", "is neither a CSV with the header"),
        ("", "is neither"),
        (
            '{"timestamp": 0, "input_length": 513, "output_length": 1, "hash_ids": [0]}',
            "line 1: 513 tokens are not 1 blocks",
        ),
        (
            '{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [0]}\n{}\n',
            "line 2: it has no 'hash_ids'",
        ),
        ("{" + '"a": {' * 200_000, "line 1: it is nested too deeply"),
        ('{"timestamp": 0, "input_length": "5", "output_length": 1, "hash_ids": [0]}', "line 1: token counts"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374\n", "line 2: it must be a time and"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nfoo,1,1\n", "line 2: TIMESTAMP must be like 2023-.*, got 'foo'"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "holds no requests"),
        (
            '{"timestamp": "foo", "input_length": 5, "output_length": 1, "hash_ids": [0]}',
            "line 1: timestamp must be a number of milliseconds, got 'foo'",
        ),
        (
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,1,1\n2023-11-16 18:15:45.68,1,1\n",
            "line 3: it came before",
        ),
    ],
)
def test_a_file_that_is_no_trace_is_named_by_its_line(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "trace"
    path.write_text(content)
    with pytest.raises(InputError, match=words):
        list(read_trace(path))


def test_a_trace_that_is_not_there() -> None:
    with pytest.raises(InputError, match=r"cannot be read \(No such file or directory\)"):
        list(read_trace(TRACES / "nothing"))


def test_a_replay_is_scaled_and_cut() -> None:
    plans = list(trace_requests(AZURE, 2.0, duration=2.3))
    assert [round(plan.due, 3) for plan in plans] == [0.0, 2.157, 2.271]


def test_the_same_seed_plans_the_same_load() -> None:
    shapes = (Lengths(10, 99), Lengths(1, 7))
    first, again = (list(poisson_arrivals(5.0, *shapes, 3, duration=20.0)) for _ in range(2))
    other = list(poisson_arrivals(5.0, *shapes, 4, duration=20.0))
    assert first == again != other
    assert first[0].due == 0.0
    assert all(10 <= plan.prompt_tokens <= 99 and 1 <= plan.output_tokens <= 7 for plan in first)
    # 100 expected; a hundred times as long a run is within 5 standard deviations of its mean.
    long = sum(1 for _ in poisson_arrivals(5.0, *shapes, 3, duration=2000.0))
    assert abs(long - 10_000) < 500
    slower = list(itertools.islice(poisson_arrivals(2.5, *shapes, 3, duration=None), 9))
    assert [plan.due for plan in slower] == pytest.approx([2 * plan.due for plan in first[:9]])
    closed = list(itertools.islice(random_requests(*shapes, 3), 9))
    assert [plan.prompt_tokens for plan in closed] == [plan.prompt_tokens for plan in first[:9]]


def test_prompts_share_what_their_blocks_share() -> None:
    maker = PromptMaker([str(number) for number in range(1000)], ",", seed=1)
    first, second, *_ = (maker.prompt(plan).split(b",") for plan in trace_requests(MOONCAKE, 1.0, duration=None))
    assert (len(first), len(second)) == (6758, 7322)
    assert first[:512] == second[:512]
    assert first[512] != second[512] or first[512:600] != second[512:600]
    assert PromptMaker([str(n) for n in range(1000)], ",", seed=2).prompt(
        PlannedRequest(0, 0, 512, 1, (0,))
    ) != b",".join(first[:512])
    # A last block that is not full is as equal as a full one.
    half = [maker.prompt(PlannedRequest(number, 0, tokens, 1, (7,))) for number, tokens in ((1, 100), (2, 200))]
    assert half[1].startswith(half[0] + b",")


def test_prompts_of_other_requests_are_different_and_exact() -> None:
    maker = PromptMaker(WORDS, " ", seed=1, overhead=7)
    prompts = [maker.prompt(PlannedRequest(number, 0, 100, 1)) for number in range(50)]
    assert {len(prompt.split()) for prompt in prompts} == {93}
    assert len({tuple(prompt.split()[:8]) for prompt in prompts}) == 50
    assert len(maker.prompt(PlannedRequest(0, 0, 3, 1)).split()) == 1


@pytest.mark.anyio
async def test_words_of_several_tokens_are_left_out() -> None:
    torn = set(random.Random(0).sample(WORDS, 20))
    asked = 0

    async def encode(text: str) -> Sequence[int]:
        nonlocal asked
        asked += 1
        return [token for word in text.split() for token in ([1, 2] if word in torn else [WORDS.index(word) + 10])]

    words, ids = await one_token_words(encode)
    assert words == [word for word in WORDS if word not in torn]
    assert ids == [WORDS.index(word) + 10 for word in words]
    assert asked < len(WORDS)


@pytest.mark.anyio
async def test_a_tokenizer_without_words_is_refused() -> None:
    async def encode(text: str) -> Sequence[int]:
        return list(text.encode())

    with pytest.raises(InputError, match="only 0 common words"):
        await one_token_words(encode)
