"""The page at `/` in headless Chromium, over an engine that repeats what it is told to."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from playwright.sync_api import Page, Route, expect

pytestmark = pytest.mark.browser

KEY = "sk-right"
PHONE = {"viewport": {"width": 375, "height": 700}}
OpenPage = Callable[..., Page]
Host = Callable[[Any], str]

MARKDOWN = """# A title

Some **bold**, *slanted* and `short` text with a [link](https://example.com/).

- one
- two
  1. deeper

| name | value |
| --- | ---: |
| wide | 1 |

```python
print("<b>" * 3)
```
"""

HOSTILE = """<img src=x onerror="alert(1)"><script>alert(2)</script>

[click](javascript:alert(3)) ![picture](http://evil.example/pixel.png) <a href="http://evil.example/">there</a>

```html" onmouseover="alert(4)
<iframe src="http://evil.example/"></iframe>
```
"""


def send(page: Page, text: str) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.get_by_label("Message", exact=True).press("Enter")


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def finish(page: Page) -> None:
    expect(page.get_by_role("button", name="Send", exact=True)).to_be_visible()


def test_an_answer_is_streamed_and_shown_as_markdown(served: Any, in_a_thread: Host, open_page: OpenPage) -> None:
    served.engine.script = served.ids(MARKDOWN)
    page = open_page(in_a_thread(served.app))
    expect(page.locator("#model")).to_have_text("smol")
    send(page, "hi")
    answer = page.get_by_role("article", name="Answer")
    expect(answer.locator("h3")).to_have_text("A title")
    finish(page)
    expect(answer.locator("strong")).to_have_text("bold")
    expect(answer.locator("em")).to_have_text("slanted")
    expect(answer.locator("p code")).to_have_text("short")
    expect(answer.locator("a")).to_have_attribute("href", "https://example.com/")
    expect(answer.locator("ul > li > ol > li")).to_have_text("deeper")
    expect(answer.locator("td")).to_have_text(["wide", "1"])
    expect(answer.locator("pre")).to_have_text('print("<b>" * 3)')
    tokens = len(served.engine.script) + 1
    expect(answer.locator(".facts")).to_contain_text(f"{tokens} tokens · ")
    expect(answer.locator(".facts")).to_contain_text(re.compile(r"tokens/s · first after \d+\.\d"))
    page.reload()
    expect(answer.locator("h3")).to_have_text("A title")
    page.get_by_role("button", name="Clear").click()
    expect(page.get_by_role("article")).to_have_count(0)
    page.reload()
    expect(page.get_by_text("Talk to smol")).to_be_visible()


@pytest.mark.parametrize("by_key", [True, False])
def test_stopping_ends_the_request(served: Any, in_a_thread: Host, open_page: OpenPage, by_key: bool) -> None:
    served.engine.script = served.ids("word " * 400)
    served.engine.token_seconds = 0.02
    page = open_page(in_a_thread(served.app))
    send(page, "hi")
    wait_until(lambda: served.engine.generated >= 5)
    served.engine.gate.clear()  # however long the page takes, there is something to stop
    expect(page.get_by_role("article", name="Answer")).to_contain_text("word word")
    assert len(served.engine.running) == 1
    if by_key:
        page.keyboard.press("Escape")
    else:
        page.get_by_role("button", name="Stop").click()
    finish(page)
    wait_until(lambda: not served.engine.running)
    assert len(served.engine.aborted) == 1
    expect(page.get_by_role("article", name="Answer")).to_contain_text("word word")
    expect(page.locator(".facts")).to_contain_text("stopped")


def test_the_settings_are_those_of_the_request(served: Any, in_a_thread: Host, open_page: OpenPage) -> None:
    page = open_page(in_a_thread(served.app))
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("System prompt").fill("Be terse.")
    values: dict[str, float] = {
        "Temperature": 0.7,
        "Top p": 0.9,
        "Top k": 40,
        "Min p": 0.05,
        "Max tokens": 5,
        "Seed": 7,
        "Presence penalty": -0.5,
        "Frequency penalty": 0.25,
        "Repetition penalty": 1.1,
    }
    for label, value in values.items():
        page.get_by_label(label).fill(str(value))
    page.reload()  # they are kept
    send(page, "line one\nline two")
    finish(page)
    ((_, prompt, params, _, _),) = served.engine.submitted
    got = {label: getattr(params, label.lower().replace(" ", "_")) for label in values}
    assert got == values
    messages = [{"role": "system", "content": "Be terse."}, {"role": "user", "content": "line one\nline two"}]
    assert prompt == served.tokenizer.encode_chat(messages)
    page.get_by_role("button", name="Settings").click()
    page.get_by_role("button", name="Reset all").click()
    page.get_by_label("Top p").fill("2")
    send(page, "again")
    expect(page.get_by_role("alert").last).to_have_text("Top p has a value that it cannot have.")
    assert len(served.engine.submitted) == 1


def test_pointing_at_a_token_shows_what_else_was_likely(served: Any, in_a_thread: Host, open_page: OpenPage) -> None:
    served.engine.script = served.ids("Caf\u00e9 \u4f60\u597d \U0001f600 end")
    page = open_page(in_a_thread(served.app))
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Show token probabilities").check()
    send(page, "hi")
    finish(page)
    assert served.engine.submitted[0][2].logprobs == 5
    tokens = page.locator(".token")
    expect(tokens).to_have_count(len(served.engine.script) + 1)
    # Characters that several tokens spell come out whole.
    assert "".join(tokens.all_text_contents()) == "Caf\u00e9 \u4f60\u597d \U0001f600 end<|im_end|>"
    tokens.last.scroll_into_view_if_needed()
    tokens.nth(0).hover()
    tooltip = page.get_by_role("tooltip")
    expect(tooltip).to_contain_text("60.7%")  # exp(-0.5)
    expect(tooltip.locator("tr")).to_have_count(5)
    expect(tooltip.locator("tr.chosen")).to_have_count(1)
    expect(tooltip.locator("tr").nth(1)).to_contain_text("22.3%")  # exp(-1.5)
    page.mouse.move(0, 0)
    expect(tooltip).to_be_hidden()
    page.locator(".tokens").focus()
    page.keyboard.press("ArrowRight")
    expect(tooltip).to_be_visible()
    page.get_by_label("Show token probabilities").uncheck()
    expect(page.locator(".markdown p")).to_have_text("Caf\u00e9 \u4f60\u597d \U0001f600 end")


def test_what_a_model_writes_is_never_run_or_loaded(served: Any, in_a_thread: Host, open_page: OpenPage) -> None:
    served.engine.script = served.ids(HOSTILE)
    page = open_page(in_a_thread(served.app))
    messages = page.locator("#messages")

    def check() -> None:
        expect(messages.locator("img, script, iframe, [onerror], [onmouseover]")).to_have_count(0)
        # What was written, the user's side, is in the same words on the page.
        expect(messages.get_by_text("<script>alert(2)</script>")).to_have_count(messages.get_by_role("article").count())

    send(page, HOSTILE)
    finish(page)
    check()
    links = messages.locator("a").evaluate_all("links => links.map(link => [link.getAttribute('href'), link.rel])")
    rel = "noopener noreferrer nofollow"
    assert links == [["http://evil.example/pixel.png", rel], ["http://evil.example/", rel]]
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Show token probabilities").check()
    send(page, HOSTILE)
    finish(page)
    expect(messages.locator(".token")).to_have_count(len(served.engine.script) + 1)
    check()
    page.reload()  # what was kept comes back no other
    check()


def test_regenerate_and_edit_take_the_place_of_what_was(served: Any, in_a_thread: Host, open_page: OpenPage) -> None:
    served.engine.script = served.ids("first")
    page = open_page(in_a_thread(served.app))
    send(page, "one")
    finish(page)
    served.engine.script = served.ids("second")
    page.get_by_role("button", name="Regenerate").click()
    expect(page.get_by_role("article", name="Answer")).to_contain_text("second")
    finish(page)
    expect(page.get_by_role("article")).to_have_count(2)
    send(page, "two")
    finish(page)
    expect(page.get_by_role("article")).to_have_count(4)
    page.get_by_role("button", name="Edit").first.click()
    page.get_by_label("Edit message").fill("three")
    page.get_by_label("Edit message").press("Enter")
    finish(page)
    expect(page.get_by_role("article")).to_have_count(2)
    prompts = [prompt for _, prompt, *_ in served.engine.submitted]
    assert prompts[-1] == served.tokenizer.encode_chat([{"role": "user", "content": "three"}])
    assert prompts[1] == prompts[0]


def test_failures_are_told_in_words(served: Any, in_a_thread: Host, open_page: OpenPage) -> None:
    page = open_page(in_a_thread(served.app), expect_errors=True)
    send(page, "word " * 600)
    expect(page.get_by_role("alert")).to_contain_text("512")
    served.engine.failure = "rank 1 is gone"
    page.get_by_role("button", name="Regenerate").click()
    expect(page.get_by_role("alert")).to_have_text("the engine has failed; the server's log says why")
    page.get_by_role("tab", name="Engine").click()
    expect(page.locator("#engine-notice")).to_contain_text("the engine has failed")


def test_reasoning_is_folded_and_a_broken_stream_says_so(served: Any, in_a_thread: Host, open_page: OpenPage) -> None:
    deltas = [{"reasoning_content": "Let me <b>think</b>."}, {"reasoning_content": " Yes."}, {"content": "42"}]
    events = [f"data: {json.dumps({'choices': [{'delta': delta}]})}\r\n\r\n" for delta in deltas]
    error = f"data: {json.dumps({'error': {'message': 'rank 1 is gone', 'param': None}})}\n\ndata: [DONE]\n\n"
    page = open_page(in_a_thread(served.app))
    for ending, words in ((error, "rank 1 is gone"), ("", "The connection ended before the answer did.")):
        page.route("**/v1/chat/completions", partial(Route.fulfill, body="".join(events) + ending))
        send(page, "hi")
        finish(page)
        answer = page.get_by_role("article", name="Answer").last
        expect(answer.locator(".markdown")).to_have_text("42")
        expect(answer.get_by_role("alert")).to_have_text(words)
        reasoning = answer.locator(".reasoning div")
        expect(reasoning).to_be_hidden()
        answer.get_by_text("Reasoning").click()
        expect(reasoning).to_have_text("Let me <b>think</b>. Yes.")


def test_a_key_is_asked_for_and_kept_for_the_tab(serve: Any, in_a_thread: Host, open_page: OpenPage) -> None:
    served = serve(api_keys=(KEY,))
    served.engine.script = served.ids("let in")
    page = open_page(in_a_thread(served.app), expect_errors=True)
    for key, words in (("sk-wrong", "asks for a key"), (KEY, "this API key is not one of the server's")):
        dialog = page.get_by_role("dialog")
        expect(dialog).to_contain_text(words)
        dialog.get_by_label("API key", exact=True).fill(key)
        dialog.get_by_role("button").click()
    expect(page.locator("#model")).to_have_text("smol")
    page.reload()
    send(page, "hi")
    expect(page.get_by_role("article", name="Answer")).to_contain_text("let in")
    assert page.evaluate("JSON.stringify(localStorage)").count(KEY) == 0
    page.get_by_role("tab", name="Engine").click()
    expect(page.locator("#figures")).to_contain_text("Running")


def test_the_engine_view_draws_blocks_and_requests(served: Any, in_a_thread: Host, open_page: OpenPage) -> None:
    served.engine.gate.clear()
    page = open_page(in_a_thread(served.app))
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url) if request.url.endswith("/v1/engine") else None)
    send(page, "hi")
    wait_until(lambda: served.engine.running)
    page.get_by_role("tab", name="Engine").click()
    blocks = page.locator("#blocks")
    expect(blocks).to_have_attribute("aria-label", "4 blocks used, 20 cached, 1,000 free")
    colours = blocks.evaluate(
        """canvas => {
            const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
            const counts = {};
            for (let i = 0; i < data.length; i += 4) {
                const name = [data[i], data[i + 1], data[i + 2], data[i + 3]].join();
                counts[name] = (counts[name] ?? 0) + 1;
            }
            return counts;
        }"""
    )
    cell = colours["232,232,226,255"] / 1000  # --free of base.css, on so many blocks
    assert colours["233,185,73,255"] == 20 * cell  # --cached
    assert colours["15,138,128,255"] == 4 * cell  # --used
    (request_id,) = served.engine.running
    row = page.locator("#requests tbody tr")
    expect(row).to_have_count(1)
    expect(row.locator("code")).to_have_attribute("title", request_id)
    expect(page.locator("#ranks")).to_contain_text("cpu · 2 threads")
    expect(page.locator("#ranks tbody tr").last).to_contain_text("of 8.8 KiB")
    width = blocks.evaluate("canvas => canvas.clientWidth")
    side = next(side for side in (16, 14, 12, 10) if -(-1024 // (width // side)) * side <= 240)
    down, right = divmod(1023, width // side)
    blocks.hover(position={"x": (right + 0.5) * side, "y": (down + 0.5) * side})
    expect(page.locator("#blocks-readout")).to_have_text(f"Block 1023: used by {request_id}")
    expect(row).to_have_class("lit")
    taken = served.engine.views_taken
    wait_until(lambda: served.engine.views_taken > taken)
    page.get_by_role("tab", name="Chat").click()
    page.wait_for_timeout(600)  # what was asked before is known
    before = len(asked)
    assert before > 0
    page.wait_for_timeout(1200)
    assert len(asked) == before  # nobody looks, nobody asks


def test_a_phone_needs_no_sideways_scrolling(served: Any, in_a_thread: Host, open_page: OpenPage) -> None:
    table = "|a|b|\n|-|-|\n|" + "z" * 90 + "|c|"
    served.engine.script = served.ids(f"```\n{'x' * 300}\n```\n\n{'y' * 300}\n\n{table}")
    page = open_page(in_a_thread(served.app), **PHONE)
    send(page, "w" * 300)
    finish(page)
    page.get_by_role("button", name="Settings").click()
    expect(page.get_by_label("Temperature")).to_be_visible()
    page.get_by_role("button", name="Close settings").click()
    for tab in ("Chat", "Engine"):
        page.get_by_role("tab", name=tab).click()
        expect(page.get_by_role("tabpanel", name=tab)).to_be_visible()
        if tab == "Engine":
            expect(page.locator("#figures")).to_contain_text("Running")
        assert page.evaluate("document.documentElement.scrollWidth") == 375
        places = page.locator(".conversation, main").filter(visible=True)
        assert places.evaluate_all("all => all.filter(each => each.scrollWidth > each.clientWidth).length") == 0
