"""The page in a real browser: nothing fails, sliders move what they should, downloads arrive, phones do not scroll.

Set RAPTOR_SCREENSHOTS to a folder to keep the screenshots.
"""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from raptor.commands.report import report

sync_api = pytest.importorskip("playwright.sync_api", reason="no playwright here: pip install playwright")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
OPTIONS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: apt-get install chromium, then run again"),
]
EVIL = '<script>alert("x")</script>'


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=OPTIONS)
        yield browser
        browser.close()


class Opened:
    """A page, the errors it gave, and what it tried to fetch."""

    def __init__(self, browser: Any, path: Path, width: int = 1280, height: int = 900, scheme: str = "light"):
        self.context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
        self.page = self.context.new_page()
        self.errors: list[str] = []
        self.fetched: list[str] = []
        self.alerts: list[str] = []
        self.page.on("dialog", lambda d: (self.alerts.append(d.message), d.dismiss()))
        self.page.on("console", lambda m: self.errors.append(m.text) if m.type == "error" else None)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda r: self.fetched.append(r.url))
        self.page.goto(path.resolve().as_uri())
        self.page.wait_for_selector("html[data-ready]", timeout=60_000)

    def plot(self, chart: str, expression: str) -> Any:
        return self.page.evaluate(
            f"(() => {{ const plot = document.querySelector('#chart-{chart} .plot'); return {expression}; }})()"
        )

    def slide(self, chart: str, control: str, value: int) -> None:
        where = f"#chart-{chart} input[data-control={control}]"
        self.page.eval_on_selector(
            where, f"e => {{ e.value = {value}; e.dispatchEvent(new Event('input', {{bubbles: true}})); }}"
        )

    def choose(self, scope: str, control: str, value: str) -> None:
        self.page.check(f"{scope} input[data-control={control}][value='{value}']", force=True)

    def download(self, selector: str) -> bytes:
        with self.page.expect_download(timeout=30_000) as waiting:
            self.page.click(selector)
        return Path(waiting.value.path()).read_bytes()


@pytest.fixture(scope="module")
def page_file(full_run: Path) -> Path:
    return report(str(full_run), num_images=2).path


@pytest.fixture(scope="module")
def desktop(browser: Any, page_file: Path) -> Iterator[Opened]:
    opened = Opened(browser, page_file)
    yield opened
    opened.context.close()


@pytest.fixture(autouse=True)
def no_errors(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "desktop" in request.fixturenames:
        opened = request.getfixturevalue("desktop")
        assert opened.errors == []
        assert [u for u in opened.fetched if not u.startswith(("file:", "data:", "blob:"))] == []


def test_every_chart_is_drawn(desktop: Opened) -> None:
    drawn = desktop.page.evaluate(
        "[...document.querySelectorAll('.chart')]"
        ".map(c => [c.dataset.chart, c.querySelector('.plot').data?.length || 0])"
    )
    assert len(drawn) >= 25 and all(num > 0 for _, num in drawn), drawn
    labels = desktop.page.eval_on_selector_all(".plot", "all => all.map(p => p.getAttribute('aria-label'))")
    assert all(len(label) > 20 for label in labels)


def test_slider_moves_the_outlined_phases(desktop: Opened, full_run: Path) -> None:
    saved = json.loads((full_run / "phases.json").read_text())["models"][0]
    controls = json.loads(desktop.page.text_content("#data"))["charts"]["similarity"]["controls"]
    options = [value for control in controls if control["name"] == "k" for value, _ in control["options"]]
    for k in ("2", "3", "4"):
        desktop.slide("similarity", "k", options.index(k))
        boxes = desktop.plot("similarity", "plot.layout.shapes.map(s => s.x1 - s.x0)")
        assert boxes == saved["phases"][k]["lengths"]
        assert " | ".join(map(str, boxes)) in desktop.page.inner_text("#chart-similarity .readout")
    within = saved["within"]["4"][0]
    assert f"{within:.3f}" in desktop.page.inner_text("#chart-similarity .readout")


def test_chooser_changes_the_matrix(desktop: Opened, full_run: Path) -> None:
    saved = json.loads((full_run / "phases.json").read_text())["models"][0]["similarity"]
    for group in ("cls", "all"):
        select = desktop.page.query_selector("#chart-similarity select[data-control=tokens]")
        if select:
            select.select_option(group)
        else:
            desktop.choose("#chart-similarity", "tokens", group)
        assert desktop.plot("similarity", "plot.data[0].z[0][5]") == pytest.approx(saved[group][0][5], rel=1e-4)


def test_depth_slider_moves_the_markers(desktop: Opened, full_run: Path) -> None:
    paths = json.loads((full_run / "dynamics.json").read_text())["teacher"]["basins"]["groups"]["cls"]["class_paths"]
    for depth in (0, 5, 12):
        desktop.slide("basin-paths", "depth", depth)
        head = desktop.plot(
            "basin-paths", "plot.data.filter((_, i) => i % 2).map(t => [t.x.at(-1), t.y.at(-1), t.z?.at(-1)])"
        )
        for found, path in zip(head, paths, strict=True):
            expected = path[depth] if found[2] is not None else [*path[depth][:2], None]
            assert found == [None if v is None else pytest.approx(v, rel=1e-3, abs=1e-6) for v in expected]
        assert f"Layer {depth} of 12" in desktop.page.inner_text("#chart-basin-paths .readout")


def test_section_chooser_and_legend_filter_curves(desktop: Opened) -> None:
    count = "plot.data.filter(t => t.mode !== 'lines').length"
    assert desktop.plot("dynamics-norm", count) == 8
    desktop.choose("[data-section=dynamics]", "tokens", "cls")
    assert desktop.plot("dynamics-norm", count) == 2
    assert desktop.plot("dynamics-norm", "plot.data.length") == 4  # with their bands
    desktop.choose("[data-section=dynamics]", "tokens", "every group")
    surrogate = desktop.page.locator("#chart-dynamics-norm .legend button", has_text="surrogate")
    surrogate.click()
    assert surrogate.get_attribute("aria-pressed") == "false" and desktop.plot("dynamics-norm", count) == 4
    surrogate.click()
    assert desktop.plot("dynamics-norm", count) == 8


def test_strip_scrubs_through_depth(desktop: Opened) -> None:
    read = "getComputedStyle(document.querySelector('.pictures .tile')).backgroundPositionX"
    for layer, place in ((0, "0%"), (6, "50%"), (12, "100%")):
        desktop.page.eval_on_selector(
            "#strip-depth", f"e => {{ e.value = {layer}; e.dispatchEvent(new Event('input')); }}"
        )
        assert desktop.page.evaluate(read) == place
        assert (
            desktop.page.locator(".film-row button[aria-current=true]")
            .first.get_attribute("aria-label")
            .endswith(f"layer {layer}")
        )
    desktop.page.locator(".film-row button").nth(3).click()
    assert "layer 3" in desktop.page.inner_text(".strip output")


def test_downloads_arrive(desktop: Opened, full_run: Path) -> None:
    text = desktop.download("#chart-dynamics-speed [data-download=csv]").decode()
    rows = list(csv.DictReader(io.StringIO(text)))
    saved = json.loads((full_run / "dynamics.json").read_text())
    own = [r for r in rows if r["series"] == "cls, surrogate"]
    assert [float(r["turn in one block (rad)"]) for r in own] == pytest.approx(
        saved["surrogate"]["direction"]["speed"]["cls"]["mean"], rel=1e-4
    )
    picture = Image.open(io.BytesIO(desktop.download("#chart-similarity [data-download=png]")))
    assert picture.size == (1520, 1440)
    assert b"<svg" in desktop.download("#chart-fidelity-r2 [data-download=svg]")[:200]
    strip = Image.open(io.BytesIO(desktop.download("#strip [data-download=png]")))
    assert strip.width > 1000 and len(set(strip.convert("RGB").resize((64, 32)).getdata())) > 50
    assert b"<svg" in desktop.download("#strip [data-download=svg]")[:200]


def test_data_table_holds_what_is_on_view(desktop: Opened, full_run: Path) -> None:
    desktop.page.click("#chart-dynamics-coherence summary")
    first = "#chart-dynamics-coherence tbody tr:first-child td"
    desktop.page.wait_for_selector(first)  # filled by an event that comes after the click
    cells = desktop.page.eval_on_selector_all(first, "all => all.map(c => c.textContent)")
    saved = json.loads((full_run / "dynamics.json").read_text())["teacher"]["rank"]["coherence"]["all"]["mean"][0]
    assert cells[0] == "1" and float(cells[1]) == pytest.approx(saved, rel=1e-3)


def test_theme_toggle_recolours(browser: Any, page_file: Path) -> None:
    dark = Opened(browser, page_file, scheme="dark")
    ground = "getComputedStyle(document.body).backgroundColor"
    colour = "plot.data.find(t => t.mode === 'lines+markers').line.color"
    before, curve = dark.page.evaluate(ground), dark.plot("fidelity-r2", colour)
    assert dark.page.evaluate("document.documentElement.dataset.theme") == "dark"
    keep(dark, "dark")
    dark.page.focus("#theme")
    dark.page.keyboard.press("Enter")
    assert dark.page.evaluate("document.documentElement.dataset.theme") == "light"
    assert dark.page.evaluate(ground) != before and dark.plot("fidelity-r2", colour) != curve
    assert dark.errors == []
    dark.context.close()


def test_phone_does_not_scroll_sideways(browser: Any, page_file: Path, run_of: Callable[..., Path]) -> None:
    phases = run_of("phases.json") / "phases.json"
    values = json.loads(phases.read_text())
    values["models"][0]["model"]["name"] = "timm/vit_small_patch14_reg4_dinov2.lvd142m_and_more"
    phases.write_text(json.dumps(values))
    long_name = Opened(browser, report(str(phases.parent)).path, width=390, height=844)
    assert long_name.page.evaluate("document.documentElement.scrollWidth") == 390
    long_name.context.close()
    phone = Opened(browser, page_file, width=390, height=844)
    widths = phone.page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert widths == [390, 390]
    wide = "[...document.querySelectorAll('.plot')].filter(p => p.getBoundingClientRect().right > innerWidth).length"
    assert phone.page.evaluate(wide) == 0
    keep(phone, "phone")
    assert phone.errors == []
    phone.context.close()


def test_everything_can_be_reached_by_keyboard(desktop: Opened) -> None:
    lost = desktop.page.evaluate(
        "[...document.querySelectorAll('button, input, select, summary, a')]"
        ".filter(e => e.tabIndex < 0 && !e.closest('.film')).length"
    )
    assert lost == 0
    desktop.page.focus("#chart-similarity input[data-control=k]")
    desktop.page.keyboard.press("Home")
    assert len(desktop.plot("similarity", "plot.layout.shapes")) == 2
    desktop.page.keyboard.press("ArrowRight")
    assert len(desktop.plot("similarity", "plot.layout.shapes")) == 3
    keep(desktop, "desktop")


def test_hostile_names_stay_text(browser: Any, run_of: Callable[..., Path]) -> None:
    folder = run_of("dynamics.json")
    values = json.loads((folder / "dynamics.json").read_text())
    values["class_names"] = {c: f"{EVIL} {c}" for c in values["class_names"]}
    (folder / "dynamics.json").write_text(json.dumps(values))
    opened = Opened(browser, report(str(folder)).path)
    assert EVIL in opened.page.inner_text("#chart-basin-paths .legend")
    assert opened.plot("basin-paths", "plot.data[1].name").startswith("&lt;script&gt;alert")
    assert opened.errors == [] and opened.alerts == []
    opened.context.close()


def test_partial_page_has_no_errors(browser: Any, run_of: Callable[..., Path]) -> None:
    opened = Opened(browser, report(str(run_of("phases.json"))).path)
    assert opened.page.locator(".hint").count() >= 5 and opened.errors == []
    opened.context.close()


def keep(opened: Opened, name: str) -> None:
    """A screenshot of the whole page, kept where RAPTOR_SCREENSHOTS says."""
    folder = os.environ.get("RAPTOR_SCREENSHOTS")
    taken = opened.page.screenshot(full_page=True)
    assert len(taken) > 50_000
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / f"{name}.png").write_bytes(taken)
