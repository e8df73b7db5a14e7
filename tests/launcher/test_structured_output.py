"""Grammars of JSON schemas, regular expressions, choices and languages, and answers of a model that follows them."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from paceline import LLM, SamplingParams, structured_output
from paceline.coordinator.constraints import GrammarError
from paceline.coordinator.errors import InputError
from paceline.launcher.grammars import MAX_REMEMBERED, TokenizerGrammars
from paceline.launcher.structured_output import MAX_CHOICES, choice, context_free, json_object, json_schema, regex
from paceline.launcher.tokenizer import Tokenizer

VOCAB_SIZE = 49_160
"""More ids than the tokenizer has tokens, and no multiple of 32."""
END_IDS = (2, 0, 49_155)
"""The last is the model's alone."""

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer(default_model: Path) -> Tokenizer:
    return Tokenizer(default_model)


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> TokenizerGrammars:
    return TokenizerGrammars(tokenizer, VOCAB_SIZE, END_IDS)


def allowed(mask: bytes) -> set[int]:
    bits = int.from_bytes(mask, "little")
    return {token for token in range(len(mask) * 8) if bits >> token & 1}


def takes(grammars: TokenizerGrammars, tokenizer: Tokenizer, grammar: str, text: str) -> bool:
    """Whether the grammar allows the text, token by token, and then the end."""
    matcher, mask = grammars.compile(grammar).result()
    for token in tokenizer.backend.encode(text, add_special_tokens=False):
        if token not in allowed(mask):
            return False
        (following,) = grammars.advance([(matcher, token)])
        assert isinstance(following, bytes)
        mask = following
    assert len(mask) == 4 * -(-VOCAB_SIZE // 32)
    assert max(allowed(mask)) < len(tokenizer.backend)
    assert len(allowed(mask) & {*END_IDS}) in (0, 2), "all end ids or none"
    return END_IDS[0] in allowed(mask)


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (json_schema(PERSON), ['{"name":"é","age":3}', '{\n  "name": "x",\n  "age": 10 }'], ['{"age":3}', "[]", " {}"]),
        (json_schema(json.dumps(PERSON)), ['{"name":"","age":0}'], ['{"name":"","age":-1}']),
        (json_object(), ["{}", '{"a": {"b": [1, null, "\\"x"]}}'], ["[]", '"x"', "{} ", "{}{}"]),
        (regex("[0-9]{3}-(a|b)+"), ["123-abba"], ["123-", "12-a", "x123-a"]),
        (
            choice(["yes", 'a "quote"', "line\nbreak", "C:\\x", "日本", "yes"]),
            ["yes", 'a "quote"', "日本"],
            ["ye", "no"],
        ),
        (choice(["line\nbreak", "C:\\x"]), ["line\nbreak", "C:\\x"], ["line", "C:/x"]),
        (context_free('start: "x" NUM\nNUM: /[0-9]+/'), ["x1", "x123"], ["x", "1x"]),
        (context_free('root ::= "a" b*\nb ::= "b" | "c"'), ["a", "abccb"], ["b", "ad"]),
        ('start: "plain Lark" | <|im_start|>', ["plain Lark", "<|im_start|>"], ["plain"]),
    ],
)
def test_a_grammar_allows_what_it_stands_for(
    grammars: TokenizerGrammars, tokenizer: Tokenizer, grammar: str, good: list[str], bad: list[str]
) -> None:
    assert [text for text in good if not takes(grammars, tokenizer, grammar, text)] == []
    assert [text for text in bad if takes(grammars, tokenizer, grammar, text)] == []


def test_choices_are_followed_up_to_their_limit(grammars: TokenizerGrammars, tokenizer: Tokenizer) -> None:
    texts = [f"item number {place}" for place in range(MAX_CHOICES)]
    grammar = choice(texts)
    grammars.check(grammar)
    assert takes(grammars, tokenizer, grammar, texts[0])
    assert takes(grammars, tokenizer, grammar, texts[-1])
    assert not takes(grammars, tokenizer, grammar, f"item number {MAX_CHOICES}")


def test_white_space_has_an_end(grammars: TokenizerGrammars, tokenizer: Tokenizer) -> None:
    grammar = json_schema(PERSON)
    assert takes(grammars, tokenizer, grammar, '{"name":' + " " * 60 + '"x","age":1}')
    assert not takes(grammars, tokenizer, grammar, '{"name":' + " " * 70 + '"x","age":1}')


@pytest.mark.parametrize(
    ("build", "named"),
    [
        (lambda: json_schema({"type": "object", "properties": {"a": {"not": {}}}}), "not"),
        (lambda: json_schema({"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}}), "uniqueItems"),
        (lambda: json_schema({"type": "bogus"}), "bogus"),
        (lambda: json_schema({"type": "string", "format": "made-up"}), "made-up"),
        (lambda: json_schema({"$ref": "http://127.0.0.1:1/x"}), "127.0.0.1"),
        (lambda: json_schema("{"), "no valid JSON at character 1"),
        (lambda: json_schema("3"), "must be an object"),
        (lambda: json_schema({"const": float("nan")}), "what JSON has not"),
        (lambda: json_schema(nested(80)), "64 levels"),
        (lambda: json_schema("[" * 100_000), "nested too deep"),
        (lambda: json_schema(optional_properties(700)), "about 490 properties that are not required"),
        (lambda: regex("["), "unclosed character class"),
        (lambda: regex("(?=a)b"), "look-ahead"),
        (lambda: regex("\ud800"), "Unicode"),
        (lambda: choice([]), "1 to 4096"),
        (lambda: choice(["a", ""]), "empty"),
        (lambda: choice("ab"), "list"),
        (lambda: context_free("start: foo"), "foo"),
        (lambda: context_free('root ::= "a'), "GBNF"),
        (lambda: context_free("start: again\nagain: again"), "no answer"),
        (lambda: "start: <|no_such_token|>", "no_such_token"),
        (lambda: "{}", "grammars"),
    ],
)
def test_what_cannot_be_followed_is_refused_in_one_line(
    grammars: TokenizerGrammars, build: Callable[[], str], named: str
) -> None:
    with pytest.raises(InputError, match=re.escape(named)) as caught:
        grammars.check(build())
    assert "\n" not in str(caught.value)


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {"items": schema}
    return schema


def optional_properties(number: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"name{place}": {"type": "integer"} for place in range(number)}}


def test_good_grammars_are_remembered_and_only_so_many(grammars: TokenizerGrammars) -> None:
    first = choice(["first"])
    assert not grammars.is_known(first)
    grammars.check(first)
    for place in range(MAX_REMEMBERED - 1):
        grammars.check(choice([str(place)]))
    assert grammars.is_known(first)
    with pytest.raises(InputError):
        grammars.check("start: foo")
    assert not grammars.is_known("start: foo")
    assert grammars.is_known(first)
    grammars.check(choice(["last"]))
    assert not grammars.is_known(first)
    assert grammars.is_known(choice(["last"]))


def test_one_matcher_that_errs_leaves_the_others_alone(grammars: TokenizerGrammars, tokenizer: Tokenizer) -> None:
    token, wrong = tokenizer.encode("yes")[0], tokenizer.encode("no")[0]
    (good, _), (bad, _) = (grammars.compile(choice(["yes"])).result() for _ in range(2))
    masks = grammars.advance([(good, token), (bad, wrong)])
    assert isinstance(masks[0], bytes)
    assert isinstance(masks[1], GrammarError)


@pytest.fixture(scope="module")
def llm(tiny: Callable[..., Any], default_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """A model of random weights over the default model's tokenizer: what it would say by itself is noise."""
    folder = tmp_path_factory.mktemp("random") / "model"
    shutil.copytree(tiny("llama", vocab_size=VOCAB_SIZE, bos_token_id=1, eos_token_id=2).folder, folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(default_model / name, folder)
    with LLM(folder, device="cpu", num_blocks=400) as llm:
        yield llm


def random_schema(generator: random.Random, depth: int = 0) -> dict[str, Any]:
    kinds: list[Callable[[], dict[str, Any]]] = [
        lambda: {"type": "string", "maxLength": generator.randint(0, 9)},
        lambda: {"type": "integer", "minimum": -5, "maximum": generator.randint(0, 1000)},
        lambda: {"enum": generator.sample(["a", 1, None, True, "é\n", [1, {"b": 2}]], 3)},
        lambda: {"type": ["boolean", "null"]},
        lambda: {"type": "string", "pattern": "^[a-c]{2}-\\d$"},
        lambda: {"type": "string", "format": "date"},
    ]
    if depth < 2:
        names = generator.sample(["name", "größe", "a b", 'q"t', "x"], generator.randint(0, 3))
        deeper = depth + 1
        kinds += [
            lambda: {
                "type": "object",
                "properties": {name: random_schema(generator, deeper) for name in names},
                "required": names[:2],
                "additionalProperties": False,
            },
            lambda: {"type": "array", "items": random_schema(generator, deeper), "minItems": 1, "maxItems": 2},
            lambda: {"anyOf": [random_schema(generator, deeper), random_schema(generator, deeper)]},
        ]
    return generator.choice(kinds)()


def test_random_weights_at_a_high_temperature_still_give_valid_json(llm: LLM) -> None:
    generator = random.Random(3)
    schemas = [PERSON, *(random_schema(generator) for _ in range(40))]
    params = [
        SamplingParams(grammar=json_schema(schema), temperature=2.0, seed=seed, max_tokens=150, top_k=seed % 3 * 1000)
        for seed, schema in enumerate(schemas)
    ]
    outputs = llm.generate([[5, 6, 7]] * len(params), params, use_tqdm=False)
    finished = 0
    for schema, output in zip(schemas, outputs, strict=True):
        answer = output.outputs[0]
        assert answer.finish_reason in ("stop", "length"), answer.error
        if answer.finish_reason == "stop":
            finished += 1
            assert answer.token_ids[-1] in llm.engine.end_ids
            jsonschema_rs.validate(schema, json.loads(answer.text))
    assert finished > 30


def test_the_package_has_the_grammars_by_name(llm: LLM) -> None:
    """As the README shows it."""
    city = structured_output.choice(["Paris", "Rome"])
    answer = llm.generate("Which?", SamplingParams(grammar=city, temperature=0), use_tqdm=False)[0].outputs[0]
    assert answer.text in ("Paris", "Rome")


def test_an_answer_by_a_grammar_meets_every_other_rule(llm: LLM) -> None:
    """n, stop texts, log-probabilities, min_tokens and ignore_eos, and a grammar that is refused before it runs."""
    hex_digits = regex("[0-9a-f]*")
    common = {"grammar": hex_digits, "temperature": 1.0, "seed": 5}
    rules = (
        {"n": 3, "max_tokens": 8},
        {"stop": ["7"], "max_tokens": 200},
        {"logprobs": 2, "max_tokens": 8},
        {"min_tokens": 20, "max_tokens": 60},
        {"ignore_eos": True, "max_tokens": 60},
        {"grammar": choice(["abc"]), "ignore_eos": True, "min_tokens": 30, "max_tokens": 60},
    )
    outputs = llm.generate([[9]] * len(rules), [SamplingParams(**{**common, **each}) for each in rules], use_tqdm=False)  # type: ignore[arg-type]
    for output in outputs:
        assert all(re.fullmatch("[0-9a-f]*", each.text) for each in output.outputs)
    assert len({each.text for each in outputs[0].outputs}) == 3
    assert outputs[1].outputs[0].stop_reason == "7"
    assert "7" not in outputs[1].outputs[0].text
    logprobs = outputs[2].outputs[0].logprobs
    assert logprobs is not None
    assert all(each.chosen < each.top[0] for each in logprobs), "of the model itself, which would say something else"
    assert len(outputs[3].outputs[0].token_ids) >= 20
    assert outputs[4].outputs[0].finish_reason == "length"
    assert (outputs[5].outputs[0].text, outputs[5].outputs[0].finish_reason) == ("abc", "stop")
    with pytest.raises(InputError, match=r"prompt 1: grammar cannot be used: .*foo"):
        llm.generate([[1], [2]], [SamplingParams(), SamplingParams(grammar="start: foo")])
