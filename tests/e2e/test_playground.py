"""The playground in headless Chromium, on a real server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from tests.support.chromium import PHONE, needs_chromium, open_browser, open_page
from tests.support.stack import Stack

pytestmark = needs_chromium
TOOLS = "Definitions (JSON)"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as browser:
        yield browser


@contextmanager
def playground(browser: Browser, stack: Stack, **options: Any) -> Iterator[Page]:
    with open_page(browser, f"{stack.url}/#/playground", **options) as page:
        expect(page.get_by_role("button", name="Completion")).to_be_visible()
        yield page


def completion(page: Page) -> Locator:
    page.get_by_role("button", name="Completion").click()
    return page.get_by_role("region", name="Completion")


def option(page: Page, name: str) -> Locator:
    """The shown control of an option. Chat and completion have one each."""
    return page.locator(f'[data-option="{name}"]:visible').locator("input, select, textarea").first


def test_a_chat_streams_and_goes_on_with_what_was_said(stack: Stack, browser: Browser) -> None:
    with playground(browser, stack) as page:
        option(page, "temperature").fill("0")
        page.get_by_label("Message", exact=True).fill("What is 3 + 4?")
        page.keyboard.press("Control+Enter")
        first = page.locator(".message.assistant").first
        expect(first).to_contain_text("3 + 4 = 7.")
        expect(first.locator("[data-figure=output]")).to_have_text("output 7 tokens")
        for figure in ("ttft", "speed", "queue", "prefill", "decode"):
            expect(first.locator(f"[data-figure={figure}]")).to_be_visible()
        prompts: list[Any] = []
        page.on("request", lambda request: prompts.append(request.post_data_json) if request.method == "POST" else None)
        page.get_by_label("Message", exact=True).fill("What is 2 + 2?")
        page.get_by_role("button", name="Send").click()
        expect(page.locator(".message.assistant [data-figure=output]")).to_have_count(2)
        assert [message["role"] for message in prompts[0]["messages"]] == ["user", "assistant", "user"]


def test_a_token_shows_its_log_probability_to_pointer_and_keyboard(stack: Stack, browser: Browser) -> None:
    asked = {"prompt": "Once there was a fox", "max_tokens": 4, "temperature": 0, "logprobs": 4}
    logprobs = httpx.post(f"{stack.url}/v1/completions", json=asked, timeout=60).json()["choices"][0]["logprobs"]
    with playground(browser, stack) as page:
        area = completion(page)
        option(page, "temperature").fill("0")
        option(page, "max_tokens").fill("4")
        page.get_by_role("button", name="Complete", exact=True).click()
        expect(area.locator(".token")).to_have_text(logprobs["tokens"])
        area.locator(".token").nth(1).hover()
        tip = page.get_by_role("tooltip")
        expect(tip.locator(".taken")).to_contain_text(f"{logprobs['token_logprobs'][1]:.3f}")
        expect(tip.locator("p")).to_have_count(len(logprobs["top_logprobs"][1]))
        page.mouse.move(0, 0)
        expect(tip).to_have_count(0)
        area.locator(".token").first.focus()
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowRight")
        expect(tip.locator(".taken")).to_contain_text(f"{logprobs['token_logprobs'][2]:.3f}")


def test_a_refused_option_is_marked_with_the_servers_sentence(stack: Stack, browser: Browser) -> None:
    with playground(browser, stack, refusals=True) as page:
        completion(page)
        option(page, "temperature").fill("-3")
        page.get_by_role("button", name="Complete", exact=True).click()
        marked = page.locator(".option.wrong")
        expect(marked).to_have_attribute("data-option", "temperature")
        expect(marked).to_contain_text("temperature must be between 0 and 100, not -3")
        option(page, "temperature").fill("0")
        page.locator("summary", has_text="More options").last.click()
        option(page, "logit_bias").fill("{")
        page.get_by_role("button", name="Complete", exact=True).click()
        expect(marked).to_have_attribute("data-option", "logit_bias")
        expect(marked).to_contain_text("logit_bias is no JSON")


def test_a_tool_is_called_and_its_result_answered(stack: Stack, browser: Browser) -> None:
    with playground(browser, stack) as page:
        page.locator("summary", has_text="Tools").click()
        page.get_by_role("button", name="Fill in an example").click()
        option(page, "temperature").fill("0")
        page.get_by_label("Message", exact=True).fill("What is the weather in Oslo?")
        page.get_by_role("button", name="Send").click()
        expect(page.locator(".tool-call")).to_contain_text('get_weather({"city": "Oslo"})')
        page.get_by_label("Result of get_weather").fill('{"weather": "sunny"}')
        page.get_by_role("button", name="Give the result").click()
        expect(page.locator(".message.assistant").last).to_contain_text("sunny")


def test_a_structured_output_keeps_to_its_regex(stack: Stack, browser: Browser) -> None:
    with playground(browser, stack) as page:
        area = completion(page)
        option(page, "structured_outputs").select_option("regex")
        page.get_by_label("Structured output: regex").fill("[0-9]{3}")
        option(page, "logprobs").select_option("")
        page.get_by_role("button", name="Complete", exact=True).click()
        expect(area.locator("[data-figure=output]")).to_be_visible()
        text = area.locator(".prose").inner_text()
        assert text.isdecimal()
        assert len(text) == 3


def test_escape_stops_an_answer(stack: Stack, browser: Browser) -> None:
    with playground(browser, stack) as page:
        area = completion(page)
        option(page, "max_tokens").fill("1900")
        page.locator("summary", has_text="More options").last.click()
        option(page, "ignore_eos").select_option("true")
        page.get_by_role("button", name="Complete", exact=True).click()
        expect(area.locator(".token").first).to_be_visible()
        page.keyboard.press("Escape")
        expect(page.get_by_role("button", name="Complete", exact=True)).to_be_enabled()
        assert 0 < area.locator(".token").count() < 1900
        stack.wait_metric("paceline_scheduler_num_requests_running", 0)


def test_two_presets_run_the_same_mix_and_the_policies_come_back(stack: Stack, browser: Browser) -> None:
    before = httpx.get(f"{stack.url}/v1/policies").json()
    with playground(browser, stack) as page:
        page.get_by_role("button", name="Two presets").click()
        page.get_by_label("First preset").select_option("sglang")
        page.get_by_label("requests").first.fill("4")
        page.get_by_label("output tokens").first.fill("8")
        switched: list[Any] = []
        page.on("request", lambda it: switched.append(it.post_data_json) if it.url.endswith("/policies") else None)
        page.get_by_role("button", name="Compare").click()
        expect(page.get_by_role("status").last).to_have_text("Done. The earlier policies are in force again.")
        rows = page.locator("[aria-label=Results] tbody tr td:first-child")
        expect(rows).to_have_text(["sglang", "sglang", "vllm-v1", "vllm-v1"])
        expect(page.locator(".strip circle")).to_have_count(2 * (4 + 8))
    assert [body.get("preset") for body in switched if body] == ["sglang", "vllm-v1", before["preset"]]
    assert httpx.get(f"{stack.url}/v1/policies").json() == before


@pytest.mark.parametrize("tab", ["Chat", "Completion", "Two presets"])
def test_no_tab_scrolls_sideways_on_a_phone(stack: Stack, browser: Browser, tab: str) -> None:
    with playground(browser, stack, size=PHONE) as page:
        page.get_by_role("button", name=tab, exact=True).click()
        for summary in page.locator("summary:visible").all():
            summary.click()
        widths = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
        assert widths[0] <= widths[1], widths
