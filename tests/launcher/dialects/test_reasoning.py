"""Reasoning and content are told apart, however the text is cut."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from paceline.launcher.dialects.parts import Content, Reasoning
from paceline.launcher.dialects.reasoning import ReasoningSplitter, forbids_reasoning, opens_reasoning


def split(pieces: Iterable[str], *, opened: bool) -> tuple[str, str]:
    splitter = ReasoningSplitter(opened=opened)
    parts = [part for piece in pieces for part in splitter.feed(piece)] + splitter.finish()
    assert all(isinstance(part, (Reasoning, Content)) and part.text for part in parts)
    return (
        "".join(part.text for part in parts if isinstance(part, Reasoning)),
        "".join(part.text for part in parts if isinstance(part, Content)),
    )


ANSWERS = [
    # Text, whether the prompt has opened the reasoning, reasoning, content.
    ("<think>\nHm.\n\nSo.\n</think>\n\nParis.\n", False, "Hm.\n\nSo.", "Paris.\n"),
    ("\nHm. < </thin\n</think>\n\n  Paris.", True, "Hm. < </thin", "  Paris."),
    ("<think>\n\n</think>\n\nParis.", False, "", "Paris."),
    ("</think>Paris </think>", True, "", "Paris </think>"),
    ("<think>never\nclosed\n", False, "never\nclosed", ""),
    ("never closed </thi", True, "never closed </thi", ""),
    ("  Paris <think> no </think>", False, "", "  Paris <think> no </think>"),
    (" <thi", False, "", " <thi"),
    ("", False, "", ""),
    ("\n", True, "", ""),
    ("<think>a</think>\n\n", False, "a", ""),
    ("<think>\n<think>twice</think>你好", False, "<think>twice", "你好"),
]


@pytest.mark.parametrize(("text", "opened", "reasoning", "content"), ANSWERS)
def test_an_answer_is_split_alike_wherever_it_is_cut(text: str, opened: bool, reasoning: str, content: str) -> None:
    assert split([text], opened=opened) == (reasoning, content)
    assert split(text, opened=opened) == (reasoning, content)
    for cut in range(1, len(text)):
        assert split([text[:cut], text[cut:]], opened=opened) == (reasoning, content)


def test_what_a_prompt_says_of_the_answers_reasoning() -> None:
    assert opens_reasoning("<|im_start|>assistant\n<think>\n")
    assert forbids_reasoning("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    for end in ("<|im_start|>assistant\n", "<think> was said", ""):
        assert not opens_reasoning(end)
        assert not forbids_reasoning(end)
