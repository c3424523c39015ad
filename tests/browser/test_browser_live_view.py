"""The live view in a real browser, over a real suite."""

from __future__ import annotations

import base64
import io
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image
from playwright.sync_api import Browser, Page, expect

from services.common.packages.model_files import DEFAULT_SOURCE
from services.gateway.admission.keys import create, write
from tests.support.clients.browsing import Load, browser, listen
from tests.support.servers.loose_suite import LooseSuite
from tests.support.servers.suite import Suite

pytestmark = pytest.mark.browser

MODEL = "tekken"
IMAGES = Path(__file__).parents[2] / "docs" / "images"
RED = "tr.gone, tr.unreachable"
Open = Callable[..., Page]


@pytest.fixture(scope="module")
def chrome() -> Iterator[Browser]:
    with browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def suite() -> Iterator[Suite]:
    with Suite("--workers", "3", "--speedup", "4") as running:
        yield running


@pytest.fixture
def open_page(chrome: Browser) -> Iterator[Open]:
    """Opens the live view of a gateway; afterwards the console shows no message and no other host was contacted."""
    opened = []

    def opener(url: str, width: int = 1280, height: int = 900, quiet: bool = True, **more: Any) -> Page:
        context = chrome.new_context(viewport={"width": width, "height": height}, **more)
        opened.append((context, listen(context), url, quiet))
        page = context.new_page()
        page.goto(f"{url}/ui")
        return page

    yield opener
    for context, heard, url, quiet in opened:
        context.close()
        assert heard.hosts == {url.partition("//")[2]}
        assert not quiet or heard.errors == []


def is_live(page: Page) -> None:
    expect(page.locator("#link")).to_have_text("live", timeout=15_000)


def test_rates_move_under_load(suite: Suite, open_page: Open) -> None:
    page = open_page(suite.url)
    is_live(page)
    expect(page.locator("tbody tr")).to_have_count(3, timeout=10_000)
    assert page.locator("tbody tr.ok").count() == 3
    with Load(suite.url, MODEL):
        for told in ("requests/s", "prompts/s", "decisions/s", "tokens/s", "characters/s"):
            moving = page.locator("text.rate.moving", has_text=re.compile(rf"[1-9][\d.]*k? {told}"))
            expect(moving.first).to_be_visible(timeout=15_000)
        expect(page.locator("path.flow.moving")).to_have_count(5, timeout=15_000)
        expect(page.locator(".waterfall li .bar")).to_have_count(14, timeout=30_000)
        newest = page.locator(".waterfall li").first
        expect(newest.locator(".who")).to_have_text(re.compile(r"worker-\d\d\d:\d\d:\d\d · tekken"))
        expect(newest.locator(".outcome")).to_have_text(" finished")
        expect(newest.locator(".sum .sub")).to_have_text(re.compile(r"^[\d.k]+ → [\d.k]+ tokens$"))
        expect(page.locator("#requests .legend")).to_contain_text("tokens: prompt → output")
        load = page.locator('td[data-name="load"]', has_text=re.compile(r"[1-9]\d* running|[\d.]+ requests/s"))
        expect(load.first).to_be_visible(timeout=15_000)
        expect(page.locator("#why .scores li.chosen")).to_have_count(1, timeout=15_000)
        expect(page.locator("#why .sentence")).to_contain_text("routed to worker-")
        expect(page.locator('td[data-name="hit rate"]', has_text="%").first).to_be_visible(timeout=30_000)
    expect(page.locator("path.flow.moving")).to_have_count(0, timeout=15_000)


def test_streamed_chat_reports_usage(suite: Suite, open_page: Open) -> None:
    page = open_page(suite.url)
    is_live(page)
    page.evaluate(
        """() => {
            window.lengths = new Set();
            const log = document.querySelector("#log");
            new MutationObserver(() => lengths.add(log.textContent.length))
              .observe(log, { childList: true, characterData: true, subtree: true });
        }"""
    )
    page.locator("#question").focus()
    page.keyboard.type("How does a river begin?")
    page.keyboard.press("Enter")
    facts = page.locator(".said:not(.mine) .facts")
    expect(facts).to_have_text(
        re.compile(r"worker-\d · \d+ of \d+ prompt tokens cached · first token after [\d.]+ m?s · [\d.,]+k? tokens/s"),
        timeout=20_000,
    )
    assert "How does a river begin?" in page.locator(".said.mine").inner_text()
    assert page.evaluate("lengths.size") > 3, "the answer came in one piece"


def test_request_with_images_shows_their_number_and_cache_hits(open_page: Open) -> None:
    file = io.BytesIO()
    Image.new("RGB", (640, 480), "#00ff00").save(file, "PNG")
    image = {"url": "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()}
    content = [{"type": "image_url", "image_url": image}, {"type": "text", "text": "Describe it. " * 20}]
    body = {"model": MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": 4}
    with Suite("--workers", "1", env={"SLUICE_WORKER_ENGINE_ARGS": "media=image"}) as images:
        page = open_page(images.url)
        is_live(page)
        newest = page.locator(".waterfall li").first.locator(".sum")
        for cached in (0, 1):
            answer = httpx.post(f"{images.url}/v1/chat/completions", json=body, timeout=60)
            assert answer.status_code == 200, answer.text
            expect(newest.locator(".sub")).to_have_text(
                re.compile(rf"tokens · 1 item, {cached} cached$"), timeout=15_000
            )
        title = newest.get_attribute("title") or ""
        page.close()  # before the gateway ends
    assert re.search(r"1 media item in the prompt, 1 of them cached; \d+ encoder tokens in all", title)


def test_killed_worker_turns_red_within_three_seconds_and_a_lost_gateway_is_shown(open_page: Open) -> None:
    with LooseSuite(Path(DEFAULT_SOURCE), workers=2, postprocess=1) as suite:
        page = open_page(suite.url, quiet=False)  # a browser complains of connections that are refused
        is_live(page)
        expect(page.locator("tbody tr.ok")).to_have_count(2, timeout=10_000)
        suite.end("worker-1", signal.SIGKILL)
        expect(page.locator(RED)).to_have_count(1, timeout=3_000)
        expect(page.locator(RED)).to_contain_text("worker-1")
        suite.start("worker-1")
        expect(page.locator("tbody tr.ok")).to_have_count(2, timeout=60_000)

        suite.end("gateway", signal.SIGKILL)
        expect(page.locator("#link")).not_to_have_text("live", timeout=10_000)
        suite.start("gateway")
        expect(page.locator("#link")).to_have_text("live", timeout=60_000)


def test_page_of_a_gateway_with_api_keys_requests_one(tmp_path: Path, open_page: Open) -> None:
    shown, record = create("viewer", scopes=["infer", "operate"])
    client, client_record = create("client")
    write(tmp_path / "keys.json", [record, client_record])
    flags = ("--api-keys-file", str(tmp_path / "keys.json"))
    with LooseSuite(Path(DEFAULT_SOURCE), workers=1, postprocess=1, gateway_flags=flags) as suite:
        page = open_page(suite.url, quiet=False)  # a browser complains of a 401
        dialog = page.locator("dialog#key")
        expect(dialog).to_be_visible(timeout=10_000)
        page.locator("#key-text").fill("sluice-wrong")
        page.keyboard.press("Enter")
        expect(dialog).to_be_visible(timeout=10_000)
        expect(page.locator("#key-reason")).to_have_text("")
        page.locator("#key-text").fill(client)
        page.keyboard.press("Enter")
        expect(page.locator("#key-reason")).to_contain_text("needs the scope 'operate'", timeout=10_000)
        expect(dialog).to_be_visible()
        page.locator("#key-text").fill(shown)
        page.keyboard.press("Enter")
        is_live(page)
        expect(page.locator("#model")).to_have_value("tiny", timeout=15_000)
        page.locator("#question").fill("Hello")
        page.locator("#send").click()
        expect(page.locator(".said:not(.mine) .facts")).to_contain_text("tokens/s", timeout=20_000)


def test_route_question_before_a_model_is_served_is_kept_and_explained(open_page: Open) -> None:
    with LooseSuite(Path(DEFAULT_SOURCE), workers=0, postprocess=1) as suite:
        page = open_page(suite.url, quiet=False)  # a browser complains when the suite ends under it
        is_live(page)
        page.locator("#question").fill("Hello")
        for _ in range(2):
            page.locator("#send").click()
            expect(page.locator("#log .wrong")).to_have_count(1)
        expect(page.locator("#log .wrong")).to_have_text("No model is available yet; try again later.")
        expect(page.locator("#question")).to_have_value("Hello")


def test_page_on_a_phone_and_by_keyboard_is_readable_and_usable(suite: Suite, open_page: Open) -> None:
    page = open_page(suite.url, width=360, height=740)
    is_live(page)
    assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    page.keyboard.press("Tab")
    expect(page.locator("a.skip")).to_be_focused()
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    expect(page.locator("#model")).to_be_focused()


def test_page_with_reduced_motion_shows_none(suite: Suite, open_page: Open) -> None:
    page = open_page(suite.url, reduced_motion="reduce")
    is_live(page)
    with Load(suite.url, MODEL):
        moving = page.locator("path.flow.moving").first
        expect(moving).to_be_attached(timeout=15_000)
        assert moving.evaluate("path => getComputedStyle(path).animationName") == "none"


def test_page_open_for_a_day_does_not_grow(suite: Suite, open_page: Open) -> None:
    page = open_page(suite.url)
    is_live(page)
    sizes = page.evaluate(
        """async () => {
            const { Model } = await import("/ui/model.js");
            const { Waterfall } = await import("/ui/waterfall.js");
            const { Workers } = await import("/ui/workers.js");
            const state = await (await fetch("/ui/data/state")).json();
            const model = new Model();
            model.whole(state);
            const list = document.createElement("ol"), body = document.createElement("tbody");
            const parts = [new Waterfall(list), new Workers(body, document.createElement("p"))];
            const sizes = new Set();
            for (let second = 0; second < 86400; second += 1) {
                const worker = { ...state.workers[0], id: `w-${second % 7}`, tokens_s: second };
                const left = second % 5 ? [] : [`w-${(second + 3) % 7}`];
                const request = {
                    id: `r-${second}`, model: "m", workers: ["w"], began_unix_ms: 0, tokenize_ms: 1, route_ms: 1,
                    first_ms: 1, rest_ms: second % 9, prompt_tokens: 9, cached_tokens: 3, output_tokens: 4,
                    outcome: "finished", degraded: [], migrations: 0,
                };
                model.delta({ rates: state.rates, workers: [worker], left, requests: [request, request] });
                if (second % 600 === 0) {
                    for (const part of parts) part.show(model);
                    sizes.add(list.querySelectorAll("*").length + body.querySelectorAll("*").length);
                }
            }
            return { most: Math.max(...sizes), samples: model.history.live.length, requests: model.requests.length };
        }"""
    )
    assert sizes["samples"] == 120
    assert sizes["requests"] == 40
    assert sizes["most"] < 500


@pytest.mark.parametrize(
    ("name", "scheme", "width"), [("light", "light", 1280), ("dark", "dark", 1280), ("narrow", "light", 390)]
)
def test_pictures_of_the_live_view_are_taken(
    suite: Suite, open_page: Open, tmp_path: Path, name: str, scheme: str, width: int
) -> None:
    """With KEEP_IMAGES they replace those in the documentation."""
    folder = IMAGES if os.environ.get("KEEP_IMAGES") else tmp_path
    page = open_page(suite.url, width=width, color_scheme=scheme)
    is_live(page)
    with Load(suite.url, MODEL, max_tokens=120):
        page.locator("#question").fill("How does a river begin?")
        page.locator("#send").click()
        expect(page.locator(".said .facts")).to_contain_text("tokens/s", timeout=20_000)
        expect(page.locator(".waterfall li .bar")).to_have_count(14, timeout=30_000)
        expect(page.locator("#why .scores li").first).to_be_visible(timeout=15_000)
        page.evaluate("document.activeElement.blur()")
        expect(page.locator("path.flow.moving")).to_have_count(5, timeout=30_000)
        file = folder / f"live-view-{name}.png"
        page.screenshot(path=file, full_page=True)
    assert file.stat().st_size > 30_000
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    red = int(ground.removeprefix("rgb(").partition(",")[0])
    assert (red < 60) == (scheme == "dark")
