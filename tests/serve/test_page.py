"""The live page in a real browser: its numbers move under load and agree with /metrics."""

import os
import re
import shutil
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from slim_scheduler.client.client import SlimClient
from tests.serve.conftest import ROOT, Running, serving
from tests.serve.wire import metrics

playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium; `apt-get install chromium`")
ANSWERED = 'slim_items_total{model="digits",outcome="answered"}'
# Where the documents' pictures go: only when asked for, so that a test run leaves the checkout as it was.
SCREENS = os.environ.get("SLIM_SCREENS")


class Load:
    """Requests of different widths until stopped."""

    def __init__(self, server: Running) -> None:
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(server, seed)) for seed in range(4)]

    def _run(self, server: Running, seed: int) -> None:
        images = np.random.default_rng(seed).standard_normal((4, 1, 8, 8), dtype=np.float32)
        with SlimClient(server.url) as client:
            while not self._stop.is_set():
                client.infer(images)
                time.sleep(0.01)

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


def until(page, expression: str, arg: object = None, seconds: float = 30.0) -> None:
    """Waits for a function of the page to be true. (The browser's own waiting needs eval, which the page forbids.)"""
    end = time.monotonic() + seconds
    while not page.evaluate(expression, arg):
        assert time.monotonic() < end, f"{expression} stayed false"
        page.wait_for_timeout(50)


# What is wider or higher than the box it is shown in, but for the parts that are meant for screen readers alone.
CUT_OFF = """[...document.querySelectorAll('.tiles *, .columns *, .scroll, .file *')]
    .filter(e => !e.closest('.visually-hidden') && e.clientWidth > 0 && e.tagName !== 'SELECT' && e.tagName !== 'INPUT')
    .filter(e => e.scrollWidth > e.clientWidth + 1).map(e => e.id || e.textContent.trim().slice(0, 40))"""
LONG_QUEUE = """document.getElementById('in-flight').textContent = '12,345';
    document.getElementById('fifo').textContent = '12,345';"""
READY = "() => document.getElementById('state').textContent === 'ready'"
CARD_LOADED = "() => document.querySelectorAll('#width option').length === 5"
BUSY = "() => Number(document.getElementById('throughput').textContent.replace(',', '')) > 1"
COUNT = "Number(document.querySelectorAll('#outcomes tbody tr')[1].cells[1].textContent.replace(/,/g, ''))"


def shown(page, element: str) -> float:
    return float(page.locator(f"#{element}").inner_text().replace(",", ""))


def cell(page, row: int, column: int) -> float:
    return float(page.locator("#outcomes tbody tr").nth(row).locator("td").nth(column).inner_text().replace(",", ""))


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def busy(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("page"), config={"router": "jsq:random", "slowdown": 3.0}) as server:
        yield server


@pytest.fixture(scope="module")
def twice(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("twice"), config={"router": "jsq:0.25+1@0.5"}) as server:
        yield server


def picture(page, name: str) -> None:
    if SCREENS:
        page.screenshot(path=str(ROOT / SCREENS / f"{name}.png"), full_page=True)


def test_the_numbers_move_under_load_and_agree_with_metrics(browser, busy):
    context = browser.new_context(viewport={"width": 1280, "height": 900}, color_scheme="light")
    page = context.new_page()
    asked: list[str] = []
    errors: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(busy.url)
    until(page, READY)
    with Load(busy):
        until(page, BUSY)
        first = cell(page, 1, 0)
        until(page, f"before => {COUNT} > before + 50", first)
        assert shown(page, "p99") >= shown(page, "p50") > 0
        assert 50 < shown(page, "accuracy") <= 100
        assert page.locator("#right").inner_text() == "accuracy"
        assert "%" in page.locator("#decisions").inner_text()
        if SCREENS:
            page.wait_for_timeout(25_000)  # a chart worth looking at
        picture(page, "desktop-light")
        page.emulate_media(color_scheme="dark")
        page.wait_for_timeout(300)
        picture(page, "desktop-dark")
    at_rest = metrics(busy.http)[ANSWERED]
    until(page, f"count => {COUNT} === count", at_rest)
    found = metrics(busy.http)
    assert cell(page, 0, 0) == found['slim_items_received_total{model="digits"}']
    assert shown(page, "in-flight") == found['slim_items_in_flight{model="digits"}'] == 0
    widths = sum(value for name, value in found.items() if name.startswith("slim_answered_items_total"))
    assert widths == at_rest
    assert abs(shown(page, "accuracy") / 100 - found['slim_expected_accuracy{model="digits"}']) < 0.05
    names = page.locator("#servers tbody th").all_inner_texts()
    assert names == ["a", "b"]
    assert all(url.startswith((busy.url, "blob:", "data:")) for url in asked), asked
    assert errors == []
    context.close()


@pytest.mark.parametrize("width", [1280, 900])
def test_no_card_ends_in_an_empty_corner_and_nothing_is_cut_off_or_wrapped_in_a_tile(browser, busy, tmp_path, width):
    long = tmp_path / "a-picture-with-a-rather-long-name-from-a-camera-20261124.png"
    Image.fromarray(np.zeros((8, 8), np.uint8)).save(long)
    page = browser.new_page(viewport={"width": width, "height": 900})
    page.goto(busy.url)
    until(page, CARD_LOADED)
    page.set_input_files("#picture", str(long))
    until(page, f"() => document.getElementById('picture-name').textContent === '{long.name}'")
    with Load(busy):
        until(page, BUSY)
        assert page.evaluate(CUT_OFF) == []
        heights = page.evaluate("[...document.querySelectorAll('.tiles > div')].map(e => e.offsetHeight)")
        assert max(heights) - min(heights) <= 1
        lines = page.evaluate("[...document.querySelectorAll('.tiles dd')].map(e => e.offsetHeight)")
        assert max(lines) < 50
    rows: dict[float, list[float]] = {}
    for top, bottom in page.evaluate(
        "[...document.querySelectorAll('.columns > section')]"
        ".map(e => e.getBoundingClientRect()).map(r => [r.top, r.bottom])"
    ):
        rows.setdefault(top, []).append(bottom)
    assert len({len(row) for row in rows.values()}) == 1  # each row of cards is full
    assert all(max(row) - min(row) <= 1 for row in rows.values())
    page.close()


def test_a_picture_is_answered_with_its_cost(browser, busy, tmp_path):
    Image.fromarray(np.tile(np.arange(64, dtype=np.uint8)[:, None] * 4, (1, 64))).save(tmp_path / "picture.png")
    page = browser.new_page()
    page.goto(busy.url)
    until(page, CARD_LOADED)
    page.set_input_files("#picture", str(tmp_path / "picture.png"))
    page.select_option("#width", "0.25")
    page.get_by_role("button", name="Ask").click()
    page.wait_for_selector("#answer ol li")
    answer = page.locator("#answer").inner_text()
    assert page.locator("#answer ol li").count() == 3
    assert "widths 0.25,0.25,0.25,0.25" in answer
    assert "computed" in answer
    page.fill("#floor", "100")
    page.select_option("#width", "")
    page.get_by_role("button", name="Ask").click()
    page.wait_for_selector("#answer .error")
    assert "accuracy" in page.locator("#answer").inner_text()
    page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_it_without_scrolling_sideways(browser, busy, scheme):
    context = browser.new_context(viewport={"width": 390, "height": 844}, color_scheme=scheme, device_scale_factor=2)
    page = context.new_page()
    page.goto(busy.url)
    until(page, READY)
    page.wait_for_selector("#chart-throughput canvas")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.evaluate(f"() => {{ {LONG_QUEUE} return {CUT_OFF} }}") == []
    with Load(busy):
        until(page, BUSY)
        picture(page, f"phone-{scheme}")
    context.close()


def test_keyboard_and_screen_reader_reach_everything(browser, busy):
    page = browser.new_page()
    page.goto(busy.url)
    until(page, CARD_LOADED)
    unnamed = page.evaluate(
        "[...document.querySelectorAll('input, select, button, [role=img], canvas[role]')]"
        ".filter(e => !e.hidden && !e.labels?.length && !e.getAttribute('aria-label') && !e.textContent.trim())"
        ".map(e => e.id)"
    )
    assert unnamed == []
    reached = set()
    for _ in range(20):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id || document.activeElement.textContent.trim()"))
    assert {"picture", "width", "deadline", "floor", "Ask"} <= reached
    assert page.locator("h1").count() == 1
    assert page.locator("html").get_attribute("lang") == "en"
    page.close()


@pytest.mark.parametrize("width", [1280, 390])
def test_second_passes_are_shown(browser, twice, tmp_path, width):
    Image.fromarray(np.tile(np.arange(64, dtype=np.uint8)[:, None] * 4, (1, 64))).save(tmp_path / "picture.png")
    page = browser.new_page(viewport={"width": width, "height": 900})
    page.goto(twice.url)
    until(page, CARD_LOADED)
    with Load(twice):
        until(page, "() => !document.getElementById('passes').hidden")
        until(page, "() => !document.getElementById('bound').hidden")
        page.wait_for_selector("#chart-bound canvas")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert page.evaluate(CUT_OFF) == []
    assert page.locator("#bound-key").inner_text().count("least at") == 2
    assert "one or two passes" in page.locator("#bound-key").inner_text()
    assert page.locator("#margins span").count() == 10
    page.wait_for_timeout(1500)
    found = metrics(twice.http)
    share = 100 * found['slim_second_passes_total{model="digits"}'] / found[ANSWERED]
    assert 0 < share < 100
    assert abs(float(page.locator("#again").inner_text().rstrip(" %")) - share) < 0.1
    page.set_input_files("#picture", str(tmp_path / "picture.png"))
    page.fill("#sure", "100")
    page.get_by_role("button", name="Ask").click()
    page.wait_for_selector("#answer ul li")
    answer = page.locator("#answer").inner_text()
    assert re.search("first pass: widths .*0.25", answer), "narrow, but where a wider instance was free"
    assert "second pass, the answer: widths 1,1,1,1" in answer
    assert "% sure" in answer
    page.close()


def test_where_nothing_is_known_of_margins_nothing_is_shown_of_them(browser, tmp_path):
    model = tmp_path / "digits"
    shutil.copytree(ROOT / "models/digits", model, ignore=shutil.ignore_patterns("accuracy*"))
    with serving(tmp_path, config={"model": model}) as server:
        page = browser.new_page()
        page.goto(server.url)
        until(page, CARD_LOADED)
        with Load(server):
            until(page, BUSY)
        assert not page.locator("#passes").is_visible()
        page.get_by_role("button", name="Ask").click()
        page.wait_for_selector("#answer ol li")
        assert "sure" not in page.locator("#answer").inner_text()
        page.close()


def test_a_server_that_stops_is_shown_as_gone(browser, tmp_path: Path):
    with serving(tmp_path) as server:
        page = browser.new_page()
        page.goto(server.url)
        until(page, READY)
        assert server.stop() == 0  # an open page does not hold the server up
        until(page, "() => document.getElementById('state').textContent !== 'ready'")
        page.close()
