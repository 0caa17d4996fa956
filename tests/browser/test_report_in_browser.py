"""The HTML page in a real browser: its script runs without an error, and does what it is there for."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from run_factory import make_empty_run, make_long_run, make_run

from verifier.report.html import render_html, write_html

CHROMIUM = shutil.which("chromium")
pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed"),
]

OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--enable-logging=stderr",
    "--virtual-time-budget=3000",
)

STARTS = 2
"""On a busy machine the browser now and then does not come to load a page; a script without an end never does."""

DRIVER = """
const out = {};
window.addEventListener("error", (event) => { out.error = event.message; });
const press = (key) => document.activeElement.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
const table = document.querySelector("table.matrix");
const stops = () => table.querySelectorAll('td[tabindex="0"]').length;
out.focused = document.hasFocus();
table.tBodies[0].rows[0].cells[1].focus();
out.first = document.getElementById(table.dataset.readout).textContent;
press("ArrowRight"); press("ArrowDown");
out.moved = document.getElementById(table.dataset.readout).textContent;
press("ArrowUp"); press("ArrowUp");
out.edge = document.getElementById(table.dataset.readout).textContent;
out.stops = stops();
const routes = document.querySelector("[data-routes]");
if (routes) {
  const drawn = () => [...routes.querySelectorAll("g[data-route]")].filter((one) => one.style.display !== "none")
    .map((one) => one.dataset.route).join() + "," +
    [...routes.querySelectorAll("div[data-route]")].filter((one) => !one.hidden).map((one) => one.dataset.route).join();
  const inputs = routes.querySelectorAll("input");
  out.drawn = [drawn()];
  inputs[1].click();
  out.drawn.push(drawn());
  inputs[0].closest("tr").dispatchEvent(new MouseEvent("mouseover", { bubbles: true }));
  out.drawn.push(drawn());
  routes.querySelector("tbody").dispatchEvent(new MouseEvent("mouseleave"));
  out.drawn.push(drawn());
}
const filter = document.getElementById("filter");
if (filter) {
  filter.value = "0000000007";
  filter.dispatchEvent(new Event("input"));
  out.shown = document.getElementById("shown").textContent;
  out.articles = [...document.querySelectorAll("article")].filter((a) => !a.hidden).map((a) => a.id).join();
}
const narrow = document.documentElement;
out.overflow = narrow.scrollWidth - narrow.clientWidth;
document.querySelector("button.copy").click();
setTimeout(() => {
  out.copy = document.querySelector("button.copy").textContent;
  document.body.dataset.out = JSON.stringify(out);
}, 200);
"""


def open_page(url: str, profile: Path, width: int = 1400) -> tuple[str, str]:
    """Return the page's DOM after its scripts ran, and what the browser logged."""
    assert CHROMIUM is not None
    for start in range(STARTS):
        folder = f"--user-data-dir={profile}-{start}"
        command = [CHROMIUM, *OPTIONS, f"--window-size={width},900", folder, "--dump-dom", url]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        except subprocess.TimeoutExpired:
            if start + 1 == STARTS:
                raise
        else:
            return done.stdout, done.stderr
    raise AssertionError


def driven(html: str) -> str:
    """Return the page with a script added that uses it, and without the policy that would forbid that script."""
    without_policy, changed = re.subn(r"<meta http-equiv=[^>]*>", "", html)
    assert changed == 1
    return without_policy.replace("</body>", f"<script>{DRIVER}</script></body>")


@pytest.mark.parametrize("run", [make_run(), make_empty_run(), make_long_run(30)], ids=["full", "empty", "long"])
def test_the_script_runs_to_its_end_without_an_error(run: object, tmp_path: Path) -> None:
    write_html(run, tmp_path / "index.html")  # type: ignore[arg-type]
    dom, log = open_page((tmp_path / "index.html").as_uri(), tmp_path / "profile")
    assert 'data-script="ready"' in dom
    assert "CONSOLE" not in log, [line for line in log.splitlines() if "CONSOLE" in line]


def test_a_link_unfolds_the_finding_that_it_names(tmp_path: Path) -> None:
    write_html(make_run(), tmp_path / "index.html")
    url = (tmp_path / "index.html").as_uri()
    folded = re.compile(r'id="finding-0f1e2d3c4b">\s*<details>')
    unfolded = re.compile(r'id="finding-0f1e2d3c4b">\s*<details open="">')
    assert folded.search(open_page(url, tmp_path / "one")[0])
    assert unfolded.search(open_page(f"{url}#finding-0f1e2d3c4b", tmp_path / "two")[0])


def test_a_message_cannot_run_a_script(tmp_path: Path) -> None:
    html = render_html(make_run()).replace("</main>", '<script>document.body.dataset.hostile = "ran"</script></main>')
    (tmp_path / "index.html").write_text(html, encoding="utf-8")
    dom, log = open_page((tmp_path / "index.html").as_uri(), tmp_path / "profile")
    assert "data-hostile" not in dom
    assert "Content Security Policy" in log


@pytest.mark.parametrize("width", [1400, 500])
def test_keys_filter_and_copy_work_and_nothing_hangs_over(width: int, tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text(driven(render_html(make_long_run(30))), encoding="utf-8")
    out = ""
    for start in range(STARTS):  # on a busy machine the browser now and then gives no page the focus
        dom, _ = open_page((tmp_path / "index.html").as_uri(), tmp_path / f"profile-{start}", width)
        (out,) = re.findall(r'data-out="([^"]*)"', dom)
        out = out.replace("&quot;", '"')
        if '"focused":true' in out:
            break
    assert '"error"' not in out
    assert '"first":"indices=R, weight=R: 11 PASS"' in out
    assert '"moved":"indices=S(0), weight=S(0): not tried"' in out
    assert '"edge":"indices=R, weight=S(0): 4 WRONG_GRADIENT, 8 PASS"' in out
    assert '"stops":1' in out
    assert '"shown":"1 shown"' in out
    assert '"articles":"finding-0000000007"' in out
    assert '"drawn":["0,0","1,1","0,0","1,1"]' in out, "a row is drawn while it is chosen, or under the pointer"
    assert '"overflow":0' in out
    assert re.search(r'"copy":"(copied|selected)"', out)
