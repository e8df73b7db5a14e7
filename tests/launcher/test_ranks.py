"""Real ranks: the same model in several processes gives the same tokens, and they end together whatever happens."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from paceline.launcher.structured_output import choice, json_schema, regex
from paceline.worker.ranks import COLLECTIVE_TIMEOUT

REFERENCE = json.loads((Path(__file__).parent.parent / "reference" / "smollm2_greedy.json").read_text())

RunRanks = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run_ranks(tmp_path: Path) -> RunRanks:
    """run_ranks(n, script, *arguments): run a script's text on n ranks, on the CPU; several of them under torchrun."""

    def run(size: int, script: str, *arguments: str, timeout: float = 240) -> subprocess.CompletedProcess[str]:
        path = tmp_path / "script.py"
        path.write_text(textwrap.dedent(script))
        command = torchrun(size, str(path), *arguments) if size > 1 else [sys.executable, str(path), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment())

    return run


def torchrun(size: int, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size), *arguments]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"}


GENERATE = """
    import json, sys
    from paceline import LLM, SamplingParams

    job = json.loads(sys.argv[1])
    llm = LLM(job["model"], device="cpu", dtype="float32", check_lockstep=True, **job.get("settings", {}))
    params = [SamplingParams(**each) for each in job["params"]]
    outputs = llm.generate(job["prompts"], params)
    for output in outputs:
        choice = output.outputs[0]
        logprobs = [entry.chosen for entry in choice.logprobs or []]
        print(json.dumps({"token_ids": choice.token_ids, "logprobs": logprobs}))
    print(json.dumps({"preemptions": llm.engine.coordinator.stats().preemptions}))
"""


def answers(result: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    """The JSON lines of rank 0; other ranks print nothing."""
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.mark.parametrize(("size", "length"), [(1, 64), (3, 24), (4, 24)])
def test_the_default_model_equals_transformers(
    size: int, length: int, run_ranks: RunRanks, default_model: Path
) -> None:
    """SmolLM2 has 9 heads and 3 KV heads, which 3 ranks share evenly; 4 ranks hold padded head groups.

    Its head is tied, as in field report B01.
    """
    cases = REFERENCE["cases"]
    rules = {"temperature": 0, "max_tokens": length, "logprobs": 0}
    job = {
        "model": str(default_model),
        "prompts": [case["prompt_ids"] for case in cases],
        "params": [rules] * len(cases),
        "settings": {"max_model_len": 256},
    }
    *got, _ = answers(run_ranks(size, GENERATE, json.dumps(job)))
    for case, answer in zip(cases, got, strict=True):
        assert answer["token_ids"] == case["output_ids"][:length], case["prompt"]
        difference = max(abs(a - b) for a, b in zip(answer["logprobs"], case["logprobs"][:length], strict=True))
        assert difference < 1e-3


def mixed_job(folder: Path, **settings: Any) -> dict[str, Any]:
    """Greedy and seeded requests of several rules, short and long."""
    rules: Sequence[dict[str, Any]] = (
        {"temperature": 0},
        {"temperature": 1.0, "seed": 1},
        {"temperature": 0.8, "seed": 2, "top_k": 9, "top_p": 0.9},
        {"temperature": 1.0, "seed": 3, "min_p": 0.05, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
        {"temperature": 0, "min_tokens": 5, "stop_token_ids": list(range(0, 256, 2))},
    )
    params = [{"max_tokens": 24, "ignore_eos": True, **rules[index % len(rules)]} for index in range(20)]
    return {
        "model": str(folder),
        "prompts": [list(range(index, index + 3 * index + 1)) for index in range(20)],
        "params": params,
        "settings": settings,
    }


@pytest.mark.parametrize(("family", "sizes"), [("llama", [4]), ("qwen2", [2]), ("qwen3", [2, 4])])
def test_any_number_of_ranks_gives_the_same_tokens(
    family: str, sizes: list[int], run_ranks: RunRanks, tiny: Callable[..., Any]
) -> None:
    folder = tiny(family).folder
    alone = answers(run_ranks(1, GENERATE, json.dumps(mixed_job(folder))))
    for size in sizes:
        assert answers(run_ranks(size, GENERATE, json.dumps(mixed_job(folder)))) == alone


def test_grammars_on_two_ranks(
    run_ranks: RunRanks, tiny: Callable[..., Any], default_model: Path, tmp_path: Path
) -> None:
    """Each rank masks its part of the vocabulary, rows with and without a grammar share steps, some are preempted."""
    folder = tmp_path / "model"
    shutil.copytree(tiny("llama", vocab_size=49_159, eos_token_id=2).folder, folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(default_model / name, folder)
    grammars = (None, json_schema({"type": "object"}), regex("[a-z ]+[.]"), choice(["yes", "no"]), regex("(ab|ba){40}"))
    rules = ({"temperature": 0}, {"temperature": 1.5, "seed": 4}, {"temperature": 1.0, "seed": 5, "top_p": 0.9})
    job = {
        "model": str(folder),
        "prompts": [list(range(index, index + 20)) for index in range(15)],
        "params": [
            {"max_tokens": 30, "grammar": grammars[index % 5], "logprobs": 0, **rules[index % 3]} for index in range(15)
        ],
    }
    *alone, _ = answers(run_ranks(1, GENERATE, json.dumps(job)))
    # Grammars take their time to be compiled. The three requests without one, which run at once, are too many already.
    *tight, last = answers(run_ranks(2, GENERATE, json.dumps(job | {"settings": {"num_blocks": 8}})))
    assert last["preemptions"] > 0
    assert [answer["token_ids"] for answer in tight] == [answer["token_ids"] for answer in alone]


def test_preemption_on_two_ranks(run_ranks: RunRanks, tiny: Callable[..., Any]) -> None:
    """Field report B23: 8 requests of 64 tokens in and out, blocks just short of their need, prefix cache on."""
    job = {
        "model": str(tiny("llama").folder),
        "prompts": [list(range(start, start + 64)) for start in range(8)],
        "params": [{"temperature": 0, "max_tokens": 64, "ignore_eos": True}] * 8,
    }
    *ample, _ = answers(run_ranks(2, GENERATE, json.dumps(job | {"settings": {"num_blocks": 200}})))
    *tight, last = answers(run_ranks(2, GENERATE, json.dumps(job | {"settings": {"num_blocks": 60}})))
    assert last["preemptions"] > 0
    assert tight == ample


ABORTS = """
    import random, sys
    import torch
    from paceline import LLM, SamplingParams
    import os

    torch.manual_seed(int(os.environ["RANK"]))  # field report B37: no rank may draw from its own generator
    llm = LLM(sys.argv[1], device="cpu", check_lockstep=True, num_blocks=80)
    engine, rng = llm.engine, random.Random(0)
    running, finished = set(), 0
    for _ in range(200):
        prompt = [rng.randrange(256) for _ in range(rng.randint(1, 100))]
        running.update(engine.add(prompt, SamplingParams(temperature=1.0, max_tokens=rng.randint(1, 40))))
        for update in engine.step():
            if update.finish_reason:
                running.discard(update.request_id)
                finished += 1
        if rng.random() < 0.3 and running:
            engine.abort([running.pop()])
    while engine.has_work:
        finished += sum(update.finish_reason is not None for update in engine.step())
    stats = engine.coordinator.stats()
    engine.coordinator.check_invariants()
    print(stats.running, stats.waiting, stats.blocks.used, sum(stats.finished.values()))
"""


def test_random_aborts_do_not_part_the_ranks(run_ranks: RunRanks, tiny: Callable[..., Any]) -> None:
    result = run_ranks(2, ABORTS, str(tiny("llama").folder))
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["0", "0", "0", "200"]


FAIL_ON_RANK_1 = """
    import sys
    import paceline.worker.worker as worker
    from paceline import LLM, SamplingParams

    follow = worker.Worker.follow  # what every rank but 0 calls

    def failing(self, plan):
        if plan.step == 5:
            raise RuntimeError("the tenth screw is loose")
        follow(self, plan)

    worker.Worker.follow = failing
    llm = LLM(sys.argv[1], device="cpu")
    llm.generate([1, 2, 3], SamplingParams(max_tokens=50, ignore_eos=True))
"""


def test_an_error_on_one_rank_is_named_and_ends_all(run_ranks: RunRanks, tiny: Callable[..., Any]) -> None:
    # Sooner than a collective gives up by itself.
    result = run_ranks(2, FAIL_ON_RANK_1, str(tiny("llama").folder), timeout=COLLECTIVE_TIMEOUT.total_seconds() - 10)
    assert result.returncode != 0
    assert "rank 1 failed: RuntimeError: the tenth screw is loose" in result.stderr


LEAVE_UNNOTICED_BY_GLOO = """
    import os, select, sys
    from paceline import LLM, SamplingParams
    from paceline.coordinator import channel
    from paceline.coordinator.errors import EngineError

    if os.environ["RANK"] == "1":
        acknowledge = channel.StepChannelReader.acknowledge

        def leave(reader, step):
            if step == 10:
                rank_0 = os.pidfd_open(channel._peer(reader._connection)[0])
                reader._connection.close()  # all that rank 0 is to notice
                select.select([rank_0], [], [])
                os._exit(1)
            acknowledge(reader, step)

        channel.StepChannelReader.acknowledge = leave
    llm = LLM(sys.argv[1], device="cpu")
    try:
        llm.generate([1, 2, 3], SamplingParams(max_tokens=50, ignore_eos=True))
    except EngineError as error:
        print(error)
"""


def test_a_collective_that_does_not_end_is_left_when_a_rank_is_gone(
    run_ranks: RunRanks, tiny: Callable[..., Any]
) -> None:
    """gloo does not notice every death (see ProcessGroupCommunicator). Here rank 1 ends only after rank 0."""
    timeout = COLLECTIVE_TIMEOUT.total_seconds() - 10
    result = run_ranks(2, LEAVE_UNNOTICED_BY_GLOO, str(tiny("llama").folder), timeout=timeout)
    assert result.returncode != 0
    assert re.search(r"rank 1 \(process \d+\) ended unexpectedly", result.stdout)


EXCHANGE = """
    import os, sys
    from paceline.coordinator.config import EngineConfig
    from paceline.worker.ranks import RankGroup

    ranks = RankGroup(EngineConfig(model="", tensor_parallel_size=int(sys.argv[1]), device="cpu"))
    texts = ["half \\ud800", "path/bad\\udcff", "a\\nb\\0c", "", "\\u2603 \\U0001f600"]
    for text in texts:
        assert ranks.exchange(text) == [text] * ranks.size, ascii(text)
    assert ranks.exchange(str(ranks.rank)) == [str(rank) for rank in range(ranks.size)]
    try:
        with ranks.together():
            raise ValueError("tensor foo\\ud800 is unknown")
    except ValueError as error:
        os.write(1, ascii(str(error)).encode() + b"\\n")
    ranks.close()
"""


@pytest.mark.parametrize("size", [1, 2])
def test_ranks_tell_each_other_any_text(size: int, run_ranks: RunRanks) -> None:
    """Names in files and paths may hold half characters: the same is told at any number of ranks."""
    result = run_ranks(size, EXCHANGE, str(size))
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == ["'tensor foo\\ud800 is unknown'"] * size


STUCK = """
    import os, select, torch
    from paceline.coordinator.config import EngineConfig
    from paceline.worker.ranks import RankGroup

    ranks = RankGroup(EngineConfig(model="", tensor_parallel_size=2, device="cpu"))
    rank_0 = os.pidfd_open(int(ranks.exchange(str(os.getpid()))[0]))

    def check_others():
        raise ConnectionError("rank 1 is gone")

    if ranks.rank == 1:
        select.select([rank_0], [], [])
    else:
        ranks.watch(check_others)
        try:
            ranks.communicator.all_reduce(torch.ones(4))
        except ConnectionError as error:
            print(error)
    ranks.close()
"""


def test_a_process_ends_though_a_collective_does_not(run_ranks: RunRanks) -> None:
    """Rank 1 ends only after rank 0, whose group's destructor would wait for the collective that was left."""
    result = run_ranks(2, STUCK, timeout=COLLECTIVE_TIMEOUT.total_seconds() - 10)
    assert (result.returncode, result.stdout) == (0, "rank 1 is gone\n"), result.stderr


REPORT_EXIT = """
    import atexit, os, sys
    from paceline import LLM

    status = 0
    try:
        with LLM(sys.argv[1], device="cpu", max_model_len=16) as llm:
            llm.generate(list(range(20)))
    except SystemExit as error:
        status = error.code
    except ValueError:
        status = 2
    os.write(1, f"{os.environ['RANK']}:{status}\\n".encode())
"""


def test_bad_input_found_on_rank_0_ends_every_rank_non_zero(run_ranks: RunRanks, tiny: Callable[..., Any]) -> None:
    result = run_ranks(2, REPORT_EXIT, str(tiny("llama").folder))
    assert sorted(result.stdout.split()) == ["0:2", "1:1"]


REFUSE = """
    import os, sys
    from paceline import LLM

    try:
        LLM(sys.argv[1], device="cpu")
    except ValueError as error:
        os.write(1, f"{os.environ['RANK']}: {'transformers' in sys.modules} {error}\\n".encode())
"""


def test_a_damaged_tokenizer_is_one_error_on_all_ranks(
    run_ranks: RunRanks, tiny: Callable[..., Any], tmp_path: Path
) -> None:
    """Only rank 0 reads it."""
    folder = tmp_path / "model"
    shutil.copytree(tiny("llama").folder, folder)
    (folder / "tokenizer.json").write_text("{}")
    lines = sorted(run_ranks(2, REFUSE, str(folder)).stdout.splitlines())
    refused = f"rank 0: the tokenizer in {folder} cannot be read: "
    assert [line.partition(refused)[0] for line in lines] == ["0: True ", "1: False "]


ENDLESS = """
    import sys
    from paceline import LLM, SamplingParams
    import os

    os.write(1, b"%d\\n" % os.getpid())  # at once: print() may write a line in two parts, and ranks share the pipe
    llm = LLM(sys.argv[1], device="cpu", max_model_len=500)
    while True:
        llm.generate([1, 2, 3], SamplingParams(max_tokens=400, ignore_eos=True))
        os.write(1, b"again\\n")
"""


def test_a_killed_rank_ends_the_job_and_is_named(tmp_path: Path, tiny: Callable[..., Any]) -> None:
    script = tmp_path / "endless.py"
    script.write_text(textwrap.dedent(ENDLESS))
    command = torchrun(2, str(script), str(tiny("llama").folder))
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    ) as process:
        assert process.stdout is not None
        ranks = [int(process.stdout.readline()) for _ in range(2)]
        assert process.stdout.readline() == "again\n"  # rank 0 has had an answer
        victim = next(pid for pid in ranks if b"RANK=1" in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
        os.kill(victim, signal.SIGKILL)
        _, stderr = process.communicate(timeout=COLLECTIVE_TIMEOUT.total_seconds() / 2)
    assert process.returncode != 0
    assert f"rank 1 (process {victim}) ended unexpectedly" in stderr
