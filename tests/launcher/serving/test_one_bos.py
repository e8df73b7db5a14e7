"""Field report B17: one BOS, whoever writes it, and none where the model has none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as RustTokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from paceline.launcher.default_model import default_model_path
from paceline.launcher.tokenizer import Tokenizer

pytestmark = pytest.mark.anyio

BOS = "<|begin_of_text|>"
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture
def llama3(tmp_path: Path) -> Tokenizer:
    """A tokenizer that adds BOS by itself, and a template that writes it too, as Llama 3's do."""
    alphabet = sorted(ByteLevel.alphabet())
    rust = RustTokenizer(BPE(vocab={letter: place for place, letter in enumerate(alphabet)}, merges=[]))
    rust.pre_tokenizer = ByteLevel(add_prefix_space=False)
    rust.decoder = ByteLevelDecoder()
    rust.add_special_tokens([AddedToken(text, special=True) for text in (BOS, "<|start|>", "<|end|>")])
    bos = rust.token_to_id(BOS)
    rust.post_processor = TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, bos)])
    backend = PreTrainedTokenizerFast(tokenizer_object=rust, bos_token=BOS, eos_token="<|end|>")
    backend.chat_template = TEMPLATE
    backend.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "tokenizer.json").read_text())["post_processor"]["type"] == "TemplateProcessing"
    return Tokenizer(tmp_path)


def test_b17_one_bos(llama3: Tokenizer) -> None:
    bos = llama3.backend.bos_token_id
    rendered = llama3.render_chat(HI)
    for token_ids in (llama3.encode_chat(HI), llama3.encode("hi"), llama3.encode(rendered), llama3.encode("")):
        assert (token_ids[0], token_ids.count(bos)) == (bos, 1)
    assert llama3.encode(rendered) == llama3.encode_chat(HI)
    forged = llama3.encode_chat([{"role": "user", "content": BOS}])
    assert forged.count(bos) == 1


@pytest.mark.parametrize("has_bos", [True, False])
async def test_b17_the_engine_gets_what_usage_counts(
    serve: Any, tokenizer: Tokenizer, llama3: Tokenizer, has_bos: bool
) -> None:
    """A chat, a plain prompt, and a rendered conversation as a plain prompt."""
    served = serve(with_tokenizer=llama3 if has_bos else tokenizer)
    rendered = served.tokenizer.render_chat(HI)
    asked = [("chat/completions", {"messages": HI}), ("completions", {"prompt": "hi"})]
    async with served.http() as client:
        for path, body in [*asked, ("completions", {"prompt": rendered})]:
            answer = await client.post(f"/v1/{path}", json=body | {"max_tokens": 1})
            token_ids = served.engine.submitted[-1][1]
            assert answer.json()["usage"]["prompt_tokens"] == len(token_ids)
            if has_bos:
                assert [place for place, token in enumerate(token_ids) if token == llama3.backend.bos_token_id] == [0]
    if has_bos:
        assert served.engine.submitted[0][1] == served.engine.submitted[2][1]
    else:
        assert served.tokenizer.backend.decode(served.engine.submitted[1][1]) == "hi"


def test_b17_none_where_the_model_has_none() -> None:
    smollm2 = Tokenizer(default_model_path())
    assert smollm2.backend.decode(smollm2.encode("hi")) == "hi"
    assert smollm2.backend.decode(smollm2.encode_chat(HI)) == smollm2.render_chat(HI)
