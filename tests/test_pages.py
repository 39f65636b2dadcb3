"""The service's web pages, used in a real headless browser as people use them."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import httpx
import pytest
from service_fixtures import Service, lacking

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Locator, Page

_ARGUMENTS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
_BROWSERS = ("chromium", "chromium-browser", "google-chrome")
_PLANNING_MS = 120_000
SMALL = "features=256\nhidden=512\nclasses=64"
INJECTION = "<script>window.hacked = 1</script>"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        lacking("playwright is not installed (shardwright[test])")
    program = next(filter(None, map(shutil.which, _BROWSERS)), None)
    if program is None:
        lacking("there is no Chromium (Debian's package chromium)")
    with sync_playwright() as started:
        opened = started.chromium.launch(executable_path=program, args=_ARGUMENTS)
        yield opened
        opened.close()


class Watched:
    """A page that must log no errors and ask no other host."""

    def __init__(self, context: BrowserContext, url: str) -> None:
        self.page: Page = context.new_page()
        self.errors: list[str] = []
        self.hosts: set[str] = set()
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", lambda said: said.type == "error" and self.errors.append(said.text))
        self.page.on("request", lambda asked: self.hosts.add(urlsplit(asked.url).netloc))
        self.own = urlsplit(url).netloc
        self.url = url

    def goto(self, path: str) -> Page:
        self.page.goto(f"{self.url}{path}")
        return self.page


@pytest.fixture(scope="module")
def context(browser: Browser) -> Iterator[BrowserContext]:
    made = browser.new_context(viewport={"width": 1280, "height": 900})
    yield made
    made.close()


@pytest.fixture
def watched(context: BrowserContext, service: Service) -> Iterator[Watched]:
    made = Watched(context, service.url)
    yield made
    made.page.close()
    assert made.errors == []
    assert made.hosts - {""} <= {made.own}


def ask(page: Page, slices: str, **fields: str) -> None:
    """Fills in the form and sends it."""
    page.get_by_label("Model", exact=True).select_option("mlp")
    page.get_by_label("Slices").fill(slices)
    page.get_by_label("Batch").fill(fields.pop("batch", "256"))
    page.get_by_label("Layers").fill("2")
    page.get_by_label("Seconds of search").fill("1")
    page.get_by_text("More", exact=True).click()
    page.get_by_label("Mesh", exact=True).fill(fields.pop("mesh", ""))
    page.get_by_label("More options").fill(fields.pop("options", SMALL))
    page.get_by_role("button", name="Plan", exact=True).click()


@pytest.fixture(scope="module")
def planned(context: BrowserContext, service: Service) -> str:
    """The address of a finished plan that was asked for by the form."""
    page = context.new_page()
    page.goto(f"{service.url}/new")
    sizes = "features=4096\nhidden=16384"
    ask(page, "v5e:2x4", batch="8192", mesh="data=4,model=2", options=sizes)
    page.wait_for_url("**/plans/pln_*")
    page.wait_for_selector("#shardings", timeout=_PLANNING_MS)
    path = urlsplit(page.url).path
    page.close()
    return path


def test_a_plan_asked_by_the_form_shows_its_progress_and_then_itself(watched: Watched) -> None:
    page = watched.goto("/new")
    ask(page, "v5e:2x2", batch="128")
    page.wait_for_url("**/plans/pln_*")
    progress = page.get_by_role("heading", name="Progress")
    assert progress.is_visible()
    assert page.get_by_role("progressbar").is_visible()
    page.wait_for_function(
        "() => /tracing|graph|meshes|polishing|writing/"
        ".test(document.querySelector('#progress-stage')?.textContent ?? 'meshes')",
        timeout=_PLANNING_MS,
    )
    page.wait_for_selector("#shardings", timeout=_PLANNING_MS)
    assert page.locator("h1").inner_text() == "mlp on v5e:2x2"
    assert "succeeded" in page.locator(".lead").inner_text()


def test_the_page_of_a_plan_tells_the_figures_of_its_json(
    watched: Watched, service: Service, planned: str
) -> None:
    page = watched.goto(planned)
    plan = httpx.get(f"{service.url}/v1{planned}/plan.json").json()
    shown = dict(
        zip(
            page.locator(".facts dt").all_inner_texts(),
            page.locator(".facts .value").all_inner_texts(),
            strict=True,
        )
    )
    assert shown["MFU"] == f"{100 * plan['estimate']['mfu']:.1f} %"
    assert shown["Solver"] == plan["solver"]["status"]
    assert page.locator(".tree .leaf").count() == len(plan["program"]["inputs"]) + len(
        plan["program"]["outputs"]
    ) - len(plan["program"]["aliases"])
    page.wait_for_selector("[data-figure] .main-svg")


def test_the_tree_is_searched_by_keys_alone(watched: Watched, planned: str) -> None:
    page = watched.goto(planned)
    page.get_by_label("Find a tensor").focus()
    page.keyboard.type("params w")
    visible = page.locator(".leaf:visible")
    every = page.locator(".leaf").count()
    assert 0 < visible.count() < every
    assert all("w" in text for text in visible.locator("th").all_inner_texts())
    assert page.locator(".found").inner_text() == f"{visible.count()} of {every} tensors"
    page.keyboard.press("Escape")
    assert visible.count() == every


def test_branches_open_and_close_by_keys(watched: Watched, planned: str) -> None:
    page = watched.goto(planned)
    page.get_by_role("button", name="Close all").press("Enter")
    assert page.locator(".leaf:visible").count() == 0
    page.locator(".tree summary").first.press("Enter")
    assert page.locator(".tree details[open]").count() == 1


def test_a_table_is_sorted_by_the_button_in_its_header(watched: Watched, planned: str) -> None:
    page = watched.goto(planned)
    table = page.locator("section[aria-labelledby=collectives] table")
    table.get_by_role("button", name="times").press("Enter")
    header = table.locator("th[aria-sort]")
    assert header.get_attribute("aria-sort") == "descending"
    assert counts_of(table) == sorted(counts_of(table), reverse=True)
    table.get_by_role("button", name="times").press("Enter")
    assert header.get_attribute("aria-sort") == "ascending"
    assert counts_of(table) == sorted(counts_of(table))


def counts_of(collectives: Locator) -> list[int]:
    texts = collectives.locator("td:nth-child(4)").all_text_contents()
    return [int(text.replace(",", "")) for text in texts]


def test_the_torus_tells_the_group_of_a_chip_by_keys_and_by_pointer(
    watched: Watched, service: Service, planned: str
) -> None:
    page = watched.goto(planned)
    axes = httpx.get(f"{service.url}/v1{planned}/plan.json").json()["mesh_axes"]
    first, size = next(iter(axes.items()))
    picture, readout = page.locator(".picture"), page.locator(".readout")
    picture.focus()
    page.keyboard.press("ArrowRight")
    told = readout.inner_text()
    assert "Device (0,0)" in told
    assert f"group on {first}: " in told
    assert told.partition(f"group on {first}: ")[2].count("(") == size
    page.keyboard.press("ArrowRight")
    assert "Device (0,1)" in readout.inner_text()
    page.keyboard.press("Escape")
    page.locator(".torus-picture").hover(position={"x": 30, "y": 45})
    assert "Device (0,0)" in readout.inner_text()


def test_two_slices_are_compared(watched: Watched) -> None:
    page = watched.goto("/new")
    ask(page, "v5e:2x2, v6e:2x2")
    page.wait_for_url("**/comparisons/cmp_*")
    page.wait_for_selector("main:not([data-refresh]) [data-figure] .main-svg", timeout=_PLANNING_MS)
    rows = page.locator("section[aria-labelledby=slices] tbody tr")
    assert [row.locator("th").inner_text() for row in rows.all()] == ["v5e:2x2", "v6e:2x2"]
    assert page.locator("[data-figure] .legendtext").all_text_contents() == ["v5e", "v6e"]
    cells = [row.locator("td:nth-child(3)") for row in rows.all()]
    seconds = [float(cell.get_attribute("data-value") or 0) for cell in cells]
    fastest = ["v5e:2x2", "v6e:2x2"][seconds.index(min(seconds))]
    assert f"Fastest step\n{fastest}" in page.locator(".facts").inner_text()
    page.get_by_role("link", name="v6e:2x2").click()
    assert page.locator("h1").inner_text() == "mlp on v6e:2x2"


def test_a_plan_that_does_not_fit_says_what_and_what_to_do(watched: Watched) -> None:
    page = watched.goto("/new")
    ask(page, "v5e:1x1", batch="1048576", options="features=16384\nhidden=65536\nclasses=1024")
    page.wait_for_selector(".failure", timeout=_PLANNING_MS)
    told = page.locator(".failure").inner_text()
    assert "fit" in told
    assert "what to do" in told
    assert page.get_by_role("button", name="Plan again").is_visible()
    page.get_by_role("link", name="Change the request").click()
    assert page.get_by_label("Slices").input_value() == "v5e:1x1"
    assert page.get_by_label("Batch").input_value() == "1048576"


def test_a_running_plan_is_cancelled_by_its_button(watched: Watched) -> None:
    page = watched.goto("/new?model=llama3-8b&slices=v5p:4x4x8&time_limit_s=60")
    page.get_by_role("button", name="Plan", exact=True).click()
    page.wait_for_url("**/plans/pln_*")
    page.get_by_role("button", name="Cancel this plan").click()
    page.wait_for_selector("text=The plan was cancelled.")
    assert page.get_by_role("button", name="Plan again").is_visible()


def test_what_is_wrong_with_a_form_is_said_in_it(browser: Browser, service: Service) -> None:
    context = browser.new_context()
    page = context.new_page()
    page.goto(f"{service.url}/new")
    ask(page, "v5e:3x3")
    alert = page.get_by_role("alert")
    assert "'v5e:3x3' is not a slice of v5e" in alert.inner_text()
    assert alert.evaluate("element => document.activeElement === element")
    assert page.get_by_label("Batch").input_value() == "256"
    context.close()


def test_lists_show_plans_and_filter_them(watched: Watched, planned: str) -> None:
    page = watched.goto("/")
    assert page.locator(f"a[href='{planned}']").is_visible()
    page.get_by_label("Status").select_option("cancelled")
    page.get_by_role("button", name="Filter").click()
    assert page.locator(f"a[href='{planned}']").count() == 0


def test_every_page_fits_a_telephone(watched: Watched, planned: str) -> None:
    watched.page.set_viewport_size({"width": 375, "height": 800})
    for path in ("/", "/new", "/comparisons", "/sign-in", planned):
        page = watched.goto(path)
        page.wait_for_load_state("networkidle")
        assert page.evaluate("document.documentElement.scrollWidth") == 375, path


def test_charts_follow_the_colour_scheme(watched: Watched, planned: str) -> None:
    watched.page.emulate_media(color_scheme="light")
    page = watched.goto(planned)
    label = page.locator("[data-figure] .xtitle").first
    label.wait_for()
    light = label.evaluate("element => getComputedStyle(element).fill")
    page.emulate_media(color_scheme="dark")
    page.wait_for_function(
        "light => getComputedStyle(document.querySelector('[data-figure] .xtitle')).fill !== light",
        arg=light,
    )


def test_the_report_is_one_file_that_works_offline(
    browser: Browser, service: Service, planned: str, tmp_path: Path
) -> None:
    text = httpx.get(f"{service.url}/v1{planned}/report").text
    (tmp_path / "report.html").write_text(text, encoding="utf-8")
    context = browser.new_context(offline=True)
    watched = Watched(context, "")
    watched.page.goto((tmp_path / "report.html").as_uri())
    watched.page.wait_for_selector("[data-figure] .main-svg")
    assert watched.page.locator("h1").inner_text() == "mlp on v5e:2x4"
    context.close()
    assert watched.errors == []
    assert watched.hosts == {""}


def test_the_report_is_drawn_where_the_service_serves_it(watched: Watched, planned: str) -> None:
    page = watched.goto(f"/v1{planned}/report")
    page.wait_for_selector("[data-figure] .main-svg")


def test_names_from_programs_are_text(watched: Watched, service: Service) -> None:
    import jax
    import jax.numpy as jnp

    from shardwright.planner.program import Program

    argument = {INJECTION: jax.ShapeDtypeStruct((64, 64), jnp.float32)}
    program = Program.trace(lambda tree: jax.tree.map(lambda x: x @ x, tree), argument)
    sent = httpx.post(
        f"{service.url}/v1/programs",
        content=program.to_stablehlo(),
        headers={"content-type": "application/octet-stream"},
    )
    asked = httpx.post(
        f"{service.url}/v1/plans",
        json={"program": sent.json()["id"], "topology": "v5e:2x2", "time_limit_s": 1.0},
    )
    page = watched.goto(f"/plans/{asked.json()['id']}")
    page.wait_for_selector("#shardings", timeout=_PLANNING_MS)
    assert INJECTION in page.locator(".tree").first.inner_text()
    assert page.evaluate("window.hacked") is None


@pytest.fixture(scope="module")
def keyed(
    service_factory: Callable[..., Service], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Service, str, str]:
    """A service with prices and with keys of two owners."""
    prices = tmp_path_factory.mktemp("prices") / "prices.toml"
    prices.write_text("[chip_hour]\nv5e = 1.2\nv6e = 2.7\n")
    made = service_factory(started=False, SHARDWRIGHT_PRICES_FILE=str(prices))
    keys = [made.make_key(name, "--scope", "read", "--scope", "plan") for name in ("ann", "bob")]
    made.start()
    return made, *(re.search(r"sw_\S+", text)[0] for text in keys)  # type: ignore[index]


def sign_in(page: Page, key: str) -> None:
    page.get_by_label("Key").fill(key)
    page.get_by_role("button", name="Sign in").click()


def test_keys_sign_in_and_see_their_own_plans_alone(
    browser: Browser, keyed: tuple[Service, str, str]
) -> None:
    service, ann, bob = keyed
    asked = httpx.post(
        f"{service.url}/v1/plans",
        json={"model": {"name": "mlp"}, "topology": "v5e:2x2", "time_limit_s": 1.0},
        headers={"Authorization": f"Bearer {bob}"},
    )
    theirs = f"/plans/{asked.json()['id']}"
    context = browser.new_context()
    page = context.new_page()
    page.goto(f"{service.url}{theirs}")
    assert urlsplit(page.url).path == "/sign-in"
    sign_in(page, "sw_no_such_key")
    assert "unknown or revoked" in page.get_by_role("alert").inner_text()
    sign_in(page, ann)
    assert page.locator("h1").inner_text() == "There is no such thing"
    page.goto(service.url)
    assert page.locator("tbody tr").count() == 0
    assert "shardwright_key" not in page.evaluate("document.cookie")
    page.get_by_role("button", name="Sign out").click()
    sign_in(page, bob)
    assert page.locator(f"a[href='{theirs}']").is_visible()
    context.close()


def test_comparisons_tell_costs_where_the_server_has_prices(
    browser: Browser, keyed: tuple[Service, str, str]
) -> None:
    service, ann, _ = keyed
    asked = httpx.post(
        f"{service.url}/v1/comparisons",
        json={
            "model": {"name": "mlp", "options": {"batch": 256, "layers": 2}},
            "topologies": ["v5e:2x2", "v6e:2x2"],
            "time_limit_s": 1.0,
        },
        headers={"Authorization": f"Bearer {ann}"},
    ).json()
    context = browser.new_context()
    page = context.new_page()
    page.goto(f"{service.url}/sign-in?then=/comparisons/{asked['id']}")
    sign_in(page, ann)
    page.wait_for_selector("main:not([data-refresh]) .facts", timeout=_PLANNING_MS)
    rows = page.locator("section[aria-labelledby=slices] tbody tr").all()
    for row, chip_hour in zip(rows, (1.2, 2.7), strict=True):
        seconds = float(row.locator("td:nth-child(3)").get_attribute("data-value") or 0)
        cost = float(row.locator("td:nth-child(10)").get_attribute("data-value") or 0)
        assert cost == pytest.approx(4 * chip_hour * seconds / 3600)
    assert "Cheapest" in page.locator(".facts").inner_text()
    assert page.get_by_role("heading", name="Cost of a million examples").is_visible()
    context.close()


def test_links_of_other_sites_lead_to_the_page_for_who_is_signed_in(
    browser: Browser, keyed: tuple[Service, str, str]
) -> None:
    service, ann, _ = keyed
    context = browser.new_context()
    page = context.new_page()
    page.goto(f"{service.url}/sign-in?then=/comparisons")
    sign_in(page, ann)
    page.goto(f"http://localhost:{service.port}/sign-in")
    page.evaluate("address => { location.href = address }", f"{service.url}/comparisons")
    page.wait_for_selector("h1:has-text('Comparisons')")
    assert page.url == f"{service.url}/comparisons"
    context.close()


def test_pages_say_everything_without_scripts(
    browser: Browser, service: Service, planned: str
) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(f"{service.url}{planned}")
    assert page.locator("tr.rest").count() > 0
    assert all(row.is_visible() for row in page.locator("tr.rest").all()[:5])
    assert page.get_by_role("button", name="Show all").count() == 0
    page.locator("input[name='torus-axis'][value='1']").check()
    assert page.locator(".layer[data-axis='1']").is_visible()
    assert not page.locator(".layer[data-axis='0']").is_visible()
    context.close()


def test_forms_without_the_token_of_the_browser_are_refused(
    keyed: tuple[Service, str, str],
) -> None:
    service, ann, _ = keyed
    form: dict[str, Any] = {"model": "mlp", "slices": "v5e:2x2"}
    with httpx.Client(base_url=service.url, cookies={"shardwright_key": ann}) as client:
        assert client.post("/new", data=form).status_code == 403
        page = client.get("/new").text
        token = re.search(r'name="form_token" value="([^"]+)"', page)
        assert token
        sent = form | {"form_token": token[1]}
        elsewhere = {"origin": "http://elsewhere.example"}
        assert client.post("/new", data=sent, headers=elsewhere).status_code == 403
        assert client.post("/new", data=form | {"form_token": "x" * 43}).status_code == 403
        assert client.post("/new", data=sent).status_code == 303


def test_pages_forbid_scripts_of_others_and_frames(service: Service) -> None:
    headers = httpx.get(service.url).headers
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self';" in policy
    assert "frame-ancestors 'none'" in policy
    assert headers["cache-control"] == "no-store"
    assert headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("then", ["//elsewhere.example", "https://elsewhere.example", "/\\x"])
def test_signing_in_goes_on_to_this_server_alone(service: Service, then: str) -> None:
    page = httpx.get(f"{service.url}/sign-in", params={"then": then}).text
    assert 'name="then" value="/"' in page
