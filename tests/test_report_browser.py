"""The report in a real browser: it loads without a complaint, sorts, scrubs, plays, turns dark, and fits a phone."""

import shutil

import pytest
import reports

from refplan.report.page import write_report

sync_api = pytest.importorskip(
    "playwright.sync_api", reason="the browser test needs playwright (pip install playwright)"
)
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
if CHROMIUM is None:
    pytest.skip("the browser test needs chromium (Debian: apt install chromium)", allow_module_level=True)


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    folder = reports.whole(tmp_path_factory.mktemp("runs") / "x", pictures=True)
    reports.record(reports.critic(), folder / "episodes" / "critic.npz", planner="critic")
    return write_report([folder], folder / "report.html").as_uri()


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser, address):
    """The page at a desk; the test fails if it complains or asks for anything but itself."""
    yield from opened(browser, address, {"width": 1280, "height": 900})


@pytest.fixture
def phone(browser, address):
    yield from opened(browser, address, {"width": 360, "height": 740}, has_touch=True)


def opened(browser, address, viewport, **options):
    context = browser.new_context(viewport=viewport, color_scheme="light", **options)
    page, said, asked = context.new_page(), [], []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(address)
    yield page
    assert said == []
    assert [url for url in asked if not url.startswith("data:")] == [address]
    context.close()


def part(page, name):
    return page.locator(f'#explorer [data-part="{name}"]')


def scrub(page, step: int) -> None:
    part(page, "step").evaluate("(s, step) => { s.value = step; s.dispatchEvent(new Event('input')); }", step)


def painted(page) -> str:
    return part(page, "fan").evaluate("canvas => canvas.toDataURL()")


def test_headings_sort_tables(page):
    table = page.locator("#results table")
    column = lambda n: table.locator(f"tbody td:nth-child({n})").all_inner_texts()  # noqa: E731
    scores = [float(text) for text in column(3)]
    assert len(set(scores)) == 3
    heading = table.locator("th", has_text="score")
    heading.locator("button").click()
    assert [float(text) for text in column(3)] == sorted(scores, reverse=True)
    assert heading.get_attribute("aria-sort") == "descending"
    heading.locator("button").click()
    assert [float(text) for text in column(3)] == sorted(scores)
    table.locator("th", has_text="planner").locator("button").press("Enter")
    assert column(1) == sorted(column(1), key=str.lower)
    assert heading.get_attribute("aria-sort") is None


def test_scrubbing_moves_everything(page):
    last = int(part(page, "step").get_attribute("max"))
    assert last >= 5
    before = {name: part(page, name).inner_text() for name in ("clock", "tile-reward", "tile-sum", "tile-best")}
    picture, fan = part(page, "picture").get_attribute("src"), painted(page)
    cursor = page.locator("#explorer line.cursor").first.get_attribute("x1")
    belief = page.locator("#explorer .plane .now").get_attribute("cx")
    scrub(page, last)
    assert part(page, "clock").inner_text() == f"step {last} of {last}"
    for name, text in before.items():
        assert part(page, name).inner_text() != text, name
    assert painted(page) != fan
    assert page.locator("#explorer line.cursor").first.get_attribute("x1") != cursor
    assert page.locator("#explorer .plane .now").get_attribute("cx") != belief
    if picture is not None:  # pictures need OpenGL where the recording is made
        assert part(page, "picture").get_attribute("src") != picture
        assert part(page, "picture").evaluate("image => image.decode().then(() => image.naturalWidth)") == 320


def test_keys_and_charts_move_the_cursor(page):
    part(page, "title").scroll_into_view_if_needed()
    page.wait_for_timeout(50)  # until the page has noticed that the explorer is in view
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert part(page, "clock").inner_text().startswith("step 2 ")
    page.keyboard.press("Shift+ArrowLeft")
    assert part(page, "clock").inner_text().startswith("step 0 ")
    part(page, "step").focus()
    page.keyboard.press("ArrowRight")
    assert part(page, "clock").inner_text().startswith("step 1 ")
    chart = page.locator("#explorer .track svg:not(.key)").first
    box = chart.bounding_box()
    chart.click(position={"x": box["width"] - 9, "y": box["height"] / 2})
    assert part(page, "step").input_value() == part(page, "step").get_attribute("max")


def test_playing_runs_to_the_end_and_stops(page):
    last = part(page, "step").get_attribute("max")
    part(page, "speed").select_option("80")
    part(page, "play").click()
    assert part(page, "play").inner_text() == "Pause"
    page.wait_for_function(f"document.querySelector('[data-part=step]').value === '{last}'")
    page.wait_for_function("document.querySelector('[data-part=play]').textContent === 'Play'")
    part(page, "play").click()  # from the start again
    part(page, "play").click()
    assert part(page, "play").inner_text() == "Play"


def test_playing_starts_at_the_first_step_when_the_first_frame_is_old(page):
    """Browsers stamp a frame with its start, which may lie before the press of the button."""
    late = "(draw) => setTimeout(() => draw(performance.now() - 60), 5)"
    page.evaluate(f"() => {{ window.requestAnimationFrame = {late}; }}")
    part(page, "speed").select_option("80")
    part(page, "play").click()
    last = part(page, "step").get_attribute("max")
    page.wait_for_function(f"document.querySelector('[data-part=step]').value === '{last}'")


def test_agents_without_belief_or_plans(page):
    names = part(page, "choice").locator("option").all_inner_texts()
    assert names[0].startswith("RefPlan")
    charts = page.locator("#explorer .track")
    assert charts.count() == 5
    part(page, "choice").select_option(str(next(n for n, name in enumerate(names) if name.startswith("critic"))))
    assert charts.count() == 3 and not part(page, "plane-panel").is_visible()
    assert part(page, "tile-effective").is_visible() and not part(page, "tile-width").is_visible()
    part(page, "choice").select_option(str(next(n for n, name in enumerate(names) if "alone" in name)))
    assert "makes no plans" in part(page, "fan-note").inner_text()
    assert charts.count() == 2, "reward, and the critic's prediction"
    assert not part(page, "tile-best").is_visible() and not part(page, "picture").is_visible()
    assert "No pictures" in part(page, "no-picture").inner_text()
    scrub(page, 3)
    assert part(page, "clock").inner_text().startswith("step 3 ")


def test_light_and_dark(page):
    paper = lambda: page.evaluate("getComputedStyle(document.body).backgroundColor")  # noqa: E731
    light, fan = paper(), painted(page)
    page.emulate_media(color_scheme="dark")
    dark = paper()
    assert dark != light
    page.locator("#theme").click()
    assert paper() == light, "the reader's choice wins over the system's"
    page.locator("#theme").click()
    assert paper() == dark
    page.wait_for_function("before => document.querySelector('[data-part=fan]').toDataURL() !== before", arg=fan)


def test_values_under_the_pointer(page):
    chart = page.locator("#diagnosis svg.lines").first
    chart.hover()
    hint = page.locator("#diagnosis .hint").first
    assert "home: model" in hint.inner_text()
    page.locator("h1").hover()
    assert not hint.is_visible()


def test_a_phone_needs_no_sideways_scrolling(phone):
    for fold in phone.locator("details").all():
        fold.evaluate("fold => { fold.open = true; }")
    width = phone.evaluate("Math.max(document.documentElement.scrollWidth, document.body.scrollWidth)")
    assert width == 360
    part(phone, "play").tap()
    part(phone, "play").tap()
    scrub(phone, 2)
    bar = phone.locator("#explorer .bar").bounding_box()
    assert bar["x"] >= 0 and bar["x"] + bar["width"] <= 360
    small = phone.evaluate(
        "[...document.querySelectorAll('main svg text')].map(t => t.getBoundingClientRect().height).filter(h => h > 0)"
    )
    assert min(small) > 8, "text in charts stays readable"
