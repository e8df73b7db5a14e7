"""The generate command and the Python API beside it: options, output forms, and one line for every mistake."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from paceline import LLM, SamplingParams
from paceline.coordinator.config import EngineConfig
from paceline.coordinator.errors import EngineError, InputError
from paceline.launcher.__main__ import EXIT_BAD_INPUT, run
from paceline.launcher.choices import choice_seed
from paceline.launcher.options import ENGINE_OPTIONS, SAMPLING_OPTIONS

FRANCE = "What is the capital of France?"
PARIS = "The capital of France is Paris."


@pytest.fixture
def command(default_model: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs `generate` in this process on the default model: (exit status, stdout, stderr)."""

    def call(*arguments: str) -> tuple[int, str, str]:
        settings = ["--model", str(default_model), "--dtype", "float32", "--device", "cpu", "--num-blocks", "64"]
        status = run(["generate", *settings, *arguments])
        return status, *capsys.readouterr()

    return call


@pytest.fixture(scope="module")
def llm(default_model: Path) -> Iterator[LLM]:
    with LLM(str(default_model), device="cpu", dtype="float32", num_blocks=64) as engine:
        yield engine


def test_every_field_has_an_option() -> None:
    engine = {field.name for field in dataclasses.fields(EngineConfig)} - {"model", "tensor_parallel_size"}
    assert {option.field for option in ENGINE_OPTIONS} == engine
    assert {option.field for option in SAMPLING_OPTIONS} == {field.name for field in dataclasses.fields(SamplingParams)}


def test_an_answer_by_a_grammar_with_its_prompts_scores(command: Callable[..., tuple[int, str, str]]) -> None:
    grammar = 'start: "It is " ("Paris" | "Rome")'
    status, out, _ = command(FRANCE, "--grammar", grammar, "--prompt-logprobs", "1", "--json")
    record = json.loads(out)
    assert (status, record["text"]) == (0, "It is Paris")
    assert len(record["prompt_logprobs"]) == len(record["top_prompt_logprobs"]) == len(record["prompt_token_ids"])
    assert record["prompt_logprobs"][0] is None
    assert all(score < 0 for score in record["prompt_logprobs"][1:])
    status, _, err = command(FRANCE, "--prompt-logprobs", "1")
    assert status == 2
    assert "--prompt-logprobs needs --json" in err


def test_the_answer_alone_is_printed(command: Callable[..., tuple[int, str, str]]) -> None:
    status, out, _ = command(FRANCE)
    assert (status, out) == (0, PARIS + "\n")


def test_json_says_all_of_each_prompt(command: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text(f"{FRANCE}\n\nWhat is 12 + 30?\n")
    status, out, _ = command("--prompt-file", str(prompts), "--json", "--logprobs", "2", "--max-tokens", "9")
    first, second = map(json.loads, out.splitlines())
    assert status == 0
    assert first["prompt"] == FRANCE
    assert len(first["prompt_token_ids"]) == 37
    assert first["token_ids"] == [504, 3575, 282, 4649, 314, 7042, 30, 2]
    assert (first["text"], first["finish_reason"], first["cached_tokens"]) == (PARIS, "stop", 0)
    assert first["logprobs"][0] == pytest.approx(-1.86431, abs=1e-3)
    assert next(iter(first["top_logprobs"][1])) == "3575"
    assert (second["finish_reason"], len(second["token_ids"])) == ("length", 9)
    assert second["cached_tokens"] == 16, "both prompts begin with the same system message"


def test_a_streamed_answer_is_the_same(command: Callable[..., tuple[int, str, str]]) -> None:
    prompts = [FRANCE, "Name two rivers."]
    whole = command(*prompts, "--max-tokens", "24")
    assert command(*prompts, "--max-tokens", "24", "--stream") == whole
    assert whole[1].startswith(f"### {FRANCE}\n{PARIS}\n### Name two rivers.\n")


def test_raw_prompts_are_continued(command: Callable[..., tuple[int, str, str]]) -> None:
    _, out, _ = command("--raw", "The history of the Roman Empire begins", "--max-tokens", "4", "--json")
    reference = json.loads((Path(__file__).parents[1] / "reference" / "smollm2_greedy.json").read_text())
    [case] = [case for case in reference["cases"] if case["prompt"] == "The history of the Roman Empire begins"]
    record = json.loads(out)
    assert (record["prompt_token_ids"], record["token_ids"]) == (case["prompt_ids"], case["output_ids"][:4])


MISTAKES: dict[str, tuple[list[str], str]] = {
    "unknown model": (["--model", "/no/such/folder", "hi"], "/no/such/folder"),
    "unknown option": (["--temprature", "1", "hi"], "--temprature"),
    "no number": (["--temperature", "hot", "hi"], "--temperature"),
    "out of range": (["--top-p", "1.01", "hi"], "--top-p must be from 0 to 1, got 1.01"),
    "empty prompt": (["  "], "prompt 0 is empty"),
    "missing file": (["--prompt-file", "/no/such/file"], "/no/such/file"),
    "too long": (["--max-model-len", "16", "hello " * 20], "allows at most 16 in prompt and answer"),
    "ranks": (["--tp", "2", "hi"], "tensor parallel size 2 needs as many ranks, but 1 rank was started"),
    "no GPU": (["--device", "cuda", "hi"], "no GPU is visible"),
    "longer than the model": (["--max-model-len", "9000", "hi"], "8192"),
    "block size": (["--block-size", "12", "hi"], "power of two"),
    "policy": (["--policy", "mine", "hi"], "prompts-first"),
    "more blocks than memory": (["--num-blocks", "10000000000", "hi"], "lower --num-blocks"),
    "more slots than memory": (["--max-num-seqs", "100000000000", "hi"], "lower --max-num-seqs"),
    "bias out of the vocabulary": (["--logit-bias", "49152:1", "hi"], "--logit-bias names token 49152"),
    "no pair": (["--logit-bias", "x", "hi"], "42:-5"),
    "log-probabilities unseen": (["--logprobs", "1", "hi"], "--logprobs needs --json"),
    "no Unicode": (["\udcff\udcfe"], "no valid Unicode"),
    "stream and json": (["--stream", "--json", "hi"], "not allowed with"),
}


@pytest.mark.parametrize("mistake", [name for name in MISTAKES if name != "no GPU"])
def test_a_mistake_is_one_line_that_names_it(mistake: str, command: Callable[..., tuple[int, str, str]]) -> None:
    arguments, words = MISTAKES[mistake]
    status, out, err = command(*arguments)
    *_, last = err.strip().splitlines()
    assert status == EXIT_BAD_INPUT
    assert out == ""
    assert last.startswith("paceline: ")
    assert words in last
    assert "Traceback" not in err


@pytest.mark.parametrize("mistake", ["unknown model", "unknown option", "empty prompt", "too long"])
def test_a_mistake_ends_every_rank(mistake: str) -> None:
    arguments, words = MISTAKES[mistake]
    result = subprocess.run(
        [sys.executable, "-m", "paceline.launcher.start", "generate", "--tp", "2", "--device", "cpu", *arguments],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.returncode == EXIT_BAD_INPUT
    assert words in result.stderr
    assert result.stderr.count("paceline: ") == result.stderr.count("\n")
    assert "Traceback" not in result.stderr


def test_a_full_disk_is_one_line(default_model: Path) -> None:
    with open("/dev/full", "w") as full:
        result = subprocess.run(
            [sys.executable, "-m", "paceline.launcher", "generate", "--model", str(default_model), FRANCE],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=240,
        )
    assert result.returncode == 1
    assert "No space left on device" in result.stderr
    assert "Traceback" not in result.stderr


def test_help_appears_once() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "paceline.launcher.start", "generate", "--tp", "2", "--help"],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.returncode == 0
    assert result.stdout.count("usage: paceline generate") == 1


def test_stop_texts_end_the_answer_and_are_cut(llm: LLM) -> None:
    [output] = llm.chat(
        [{"role": "user", "content": FRANCE}], SamplingParams(temperature=0, max_tokens=20, stop=["xyz", "France is"])
    )
    choice = output.outputs[0]
    assert (choice.text, choice.finish_reason, choice.stop_reason) == ("The capital of ", "stop", "France is")
    assert choice.token_ids == [504, 3575, 282, 4649, 314]
    assert choice.timings is not None
    assert busy(llm) == (0, 0, 0)


def test_stop_texts_wait_for_min_tokens(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=20, stop=" is", min_tokens=5)
    choice = llm.chat([{"role": "user", "content": FRANCE}], params)[0].outputs[0]
    assert (choice.text, choice.finish_reason, choice.stop_reason) == (PARIS, "stop", None)


@pytest.mark.parametrize(("include", "text"), [(False, "The capital of"), (True, "The capital of France")])
def test_a_stop_token_ends_the_answer(llm: LLM, include: bool, text: str) -> None:
    params = SamplingParams(temperature=0, max_tokens=20, stop_token_ids=[4649], include_stop_str_in_output=include)
    choice = llm.chat([{"role": "user", "content": FRANCE}], params)[0].outputs[0]
    assert (choice.token_ids, choice.finish_reason, choice.stop_reason) == ([504, 3575, 282, 4649], "stop", 4649)
    assert choice.text == text


def test_results_carry_timings_and_prompt(llm: LLM) -> None:
    [output] = llm.generate("Hello there", SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
    timings = output.outputs[0].timings
    assert output.prompt == "Hello there"
    assert timings is not None
    assert timings.first_scheduled is not None
    assert timings.first_token is not None
    assert timings.arrived <= timings.first_scheduled <= timings.first_token <= timings.finished


def test_one_bad_prompt_refuses_the_batch(llm: LLM) -> None:
    """Field report B30: the door names the position, and nothing of the batch runs."""
    for bad in ([1, 999999999], [-1], [49152], [1.5], [True], [2**63], []):
        with pytest.raises(InputError, match="prompt 1: "):
            llm.generate([[1, 2], bad])  # type: ignore[list-item]
    assert not llm.engine.coordinator.stats().waiting


def test_streams_and_batches_take_turns(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    alone = [llm.generate([ids], params)[0].outputs[0].token_ids for ids in ([1, 2], [3, 4])]
    first, second = llm.stream([1, 2], params), llm.stream([3, 4], params)
    got: list[list[int]] = [[*next(first).token_ids], [*next(second).token_ids]]
    llm.generate([5, 6], params)
    for answer, stream in zip(got, (first, second), strict=True):
        for chunk in stream:
            answer.extend(chunk.token_ids)
    assert got == alone


def test_threads_share_an_engine(tiny: Callable[..., Any]) -> None:
    """Four threads ask at once, one of them by a stream, and each gets what it gets alone; another one may close it."""
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    prompts = [[number, 2, 3] for number in range(24)]

    def ask(engine: LLM, own: list[list[int]]) -> list[list[int]]:
        return [engine.generate(prompt, params)[0].outputs[0].token_ids for prompt in own]

    def listen(engine: LLM, own: list[list[int]]) -> list[list[int]]:
        return [[token for chunk in engine.stream(prompt, params) for token in chunk.token_ids] for prompt in own]

    before = signal.getsignal(signal.SIGTERM)
    with LLM(str(tiny("llama").folder), device="cpu") as engine, ThreadPoolExecutor(4) as pool:
        expected = ask(engine, prompts)
        ways = (ask, listen, ask, ask)
        shares = [
            pool.submit(way, engine, prompts[start : start + 6])
            for way, start in zip(ways, (0, 6, 12, 18), strict=True)
        ]
        assert [answer for share in shares for answer in share.result()] == expected
        pool.submit(engine.close).result()
    signal.signal(signal.SIGTERM, before)  # only this thread can


def test_leaving_a_stream_aborts_the_rest(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=500, ignore_eos=True)
    with contextlib.closing(llm.stream([[1, 2], [3, 4]], params)) as stream:
        assert next(stream).token_ids
    assert busy(llm) == (0, 0, 0)
    for chunk in llm.stream([[1, 2], [3, 4]], params):
        assert chunk.token_ids
        break
    llm.generate([5, 6], SamplingParams(max_tokens=1))
    assert busy(llm) == (0, 0, 0), "a stream that nobody reads any more ends with the next step"


def busy(llm: LLM) -> tuple[int, int, int]:
    """Running requests, waiting ones, blocks in use."""
    stats = llm.engine.coordinator.stats()
    return stats.running, stats.waiting, stats.blocks.used


def test_each_prompt_has_its_own_parameters(llm: LLM) -> None:
    params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in (1, 5)]
    outputs = llm.generate(["a b c", "d e f"], params)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 5]
    with pytest.raises(InputError, match="2 sampling parameters were given for 1 prompts"):
        llm.generate("a", params)
    with pytest.raises(InputError, match="0 sampling parameters were given for 1 prompts"):
        llm.generate("a", [])


def test_no_prompts_give_no_results(llm: LLM) -> None:
    assert llm.generate([]) == []


def test_the_garbage_collector_does_not_look_through_what_a_running_engine_consists_of(
    tiny: Callable[..., Any],
) -> None:
    gc.unfreeze()  # other tests' engines may be running
    with LLM(str(tiny("llama").folder), device="cpu"):
        assert len(gc.get_objects()) < gc.get_freeze_count() / 5
    assert gc.get_freeze_count() < 1000


def test_a_closed_engine_says_so_and_lets_go(tiny: Callable[..., Any]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with LLM(str(tiny("llama").folder), device="cpu") as engine:
        stream = engine.stream([1, 2], SamplingParams(ignore_eos=True))
        next(stream)
    with pytest.raises(EngineError, match="closed"):
        engine.generate([1, 2])
    with pytest.raises(EngineError, match="closed"):
        next(stream)
    assert signal.getsignal(signal.SIGTERM) == before
    remains = weakref.ref(engine.engine)
    del engine, stream
    gc.collect()
    assert remains() is None, "nothing of a closed engine, its model's memory least of all, may be kept"


def test_unknown_settings_are_named() -> None:
    with pytest.raises(InputError, match="unknown setting gpu_memory"):
        LLM("anything", gpu_memory=0.9)


def test_without_a_tokenizer_prompts_are_ids(tiny: Callable[..., Any]) -> None:
    with LLM(str(tiny("llama").folder), device="cpu") as engine:
        assert len(engine.generate([1, 2], SamplingParams(max_tokens=3, ignore_eos=True))[0].outputs[0].token_ids) == 3
        with pytest.raises(InputError, match="has no tokenizer: prompts can be token ids alone"):
            engine.generate("text")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("config.json", '{"num_hidden_layers": "30"}', "config.json: "),
        ("config.json", "{", "config.json"),
        ("tokenizer_config.json", "[]", r"tokenizer_config\.json must hold a JSON object, not \[\]$"),
        ("tokenizer.json", "{}", "the tokenizer in .* cannot be read: "),
    ],
)
def test_damaged_files_are_named_in_one_line(
    name: str, content: str, words: str, default_model: Path, tmp_path: Path
) -> None:
    for path in default_model.iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / name).unlink()
    fields = json.loads((default_model / name).read_bytes()) | json.loads(content) if ":" in content else None
    (tmp_path / name).write_text(content if fields is None else json.dumps(fields))
    with pytest.raises(InputError, match=words) as error:
        LLM(str(tmp_path), device="cpu")
    assert "\n" not in str(error.value)


def test_a_damaged_tokenizer_config_is_told_before_weights_are_read(default_model: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").symlink_to(default_model / "config.json")
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(InputError, match=r"tokenizer_config\.json must hold a JSON object, not \[\]$"):
        LLM(str(tmp_path), device="cpu")  # which has no weights


@pytest.mark.parametrize("prompts", [None, 3])
def test_what_is_no_prompt_is_refused(prompts: Any, llm: LLM) -> None:
    with pytest.raises(InputError, match="prompts must be a text"):
        llm.generate(prompts)


def test_choice_seeds_stay_in_64_bits() -> None:
    seeds = [choice_seed(2**63 - 1, index) for index in range(128)]
    assert len(set(seeds)) == 128
    assert all(seed is not None and -(2**63) <= seed < 2**63 for seed in seeds)
