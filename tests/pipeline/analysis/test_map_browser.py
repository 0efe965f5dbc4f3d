"""The map in a browser: chunks are text, a search finds, the nearest are told; nothing is fetched."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.analysis.map import render_map_page
from tests.flows.api import PATIENCE, until


@pytest.mark.slow
def test_a_person_searches_points_and_zooms(browser: Any, tmp_path: Path) -> None:
    labels = ["<script>document.title='bad'</script>", "<b>bold</b>␣", "the␣", "The␣", "he␣"]
    labels += [f"word{number}␣" for number in range(400)]
    size = len(labels)
    near = (np.arange(size)[:, None] + np.arange(1, 4)) % size
    rows = np.arange(size)
    places = {"UMAP": np.random.default_rng(0).normal(size=(size, 2)), "PCA": np.stack([rows, rows], 1).astype(float)}
    path = tmp_path / "map.html"
    points = dict(labels=labels, counts=size - rows, lengths=rows % 9 + 1, clusters=rows % 5, near=near, cosines=near)
    path.write_text(render_map_page("run", "about", "d1", points | {"places": places, "pixels": False}))
    page, wrong, fetched = browser.new_page(), [], []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
    page.on("request", lambda request: fetched.append(request.url))
    plain = browser.new_context(java_script_enabled=False).new_page()
    plain.goto(path.as_uri())
    assert "The map needs scripts" in plain.inner_text("header")
    plain.context.close()
    page.goto(path.as_uri())
    page.fill("#search", "word39")
    assert page.inner_text("#found") == "11 found"
    page.keyboard.press("Enter")
    assert page.inner_text("#found") == "1 of 11" and page.inner_text("#card b") == "word39␣"
    assert page.locator("#card tr").count() == 3
    page.fill("#search", "bold")
    page.keyboard.press("Enter")
    assert page.inner_text("#card b") == "<b>bold</b>␣" and page.locator("#card b b").count() == 0
    page.keyboard.press("Escape")
    page.select_option("#map", "PCA")
    for colour in ("length", "frequency"):
        page.select_option("#colour", colour)
    assert "occurrences 1" in page.inner_text("#legend")
    before = page.evaluate("view.scale")
    page.mouse.move(400, 300)
    page.mouse.wheel(0, -300)
    page.wait_for_function(f"view.scale > {before} * 1.3")
    page.click("#reset")
    assert page.evaluate("view.scale") == pytest.approx(before)
    light = page.evaluate("colours.at(-1)")
    page.emulate_media(color_scheme="dark")
    until(PATIENCE, lambda: page.evaluate("colours.at(-1)") != light)  # brighter on a dark page
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(21, 24, 28)"
    page.mouse.move(400, 300)
    page.mouse.down()
    assert page.evaluate("last") is not None
    page.evaluate("canvas.dispatchEvent(new PointerEvent('pointercancel', { pointerId: [...pointers.keys()][0] }))")
    assert page.evaluate("last") is None
    page.mouse.up()
    touch = page.context.new_cdp_session(page)
    before, (x, y) = page.evaluate("view.scale"), page.evaluate("[sx(0), sy(0)]")
    for kind, apart in (("touchStart", 40), ("touchMove", 60), ("touchMove", 120)):  # two fingers
        fingers = [{"x": 400 + sign * apart / 2, "y": 300, "id": number} for number, sign in ((0, -1), (1, 1))]
        touch.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": fingers})
    until(PATIENCE, lambda: page.evaluate("view.scale") == pytest.approx(3 * before, rel=0.01))
    assert page.evaluate("[sx(0), sy(0)]") != [x, y]
    touch.send("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})
    assert page.evaluate("last") is None and page.evaluate("pointers.size") == 0
    page.goto("about:blank")
    page.goto(f"{path.as_uri()}#100%")
    assert page.input_value("#search") == "100%"
    for named in ("word39", "he", "the", "The"):  # equal before alike
        page.goto("about:blank")
        page.goto(f"{path.as_uri()}#{named}%E2%90%A3")
        assert page.inner_text("#card b") == f"{named}␣"
    assert page.title() == "run" and not wrong and {each.split("#")[0] for each in fetched} == {path.as_uri()}
    page.close()
