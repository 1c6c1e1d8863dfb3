"""The page's elements stay while events change them: a click, the focus and a selection survive, in a real Chromium."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from node.web.api_routes import STATIC
from tests.system.browser import CHROMIUM, MISSING, chromium, tab
from tests.system.web_folder import files_of

pytestmark = [pytest.mark.system, pytest.mark.skipif(CHROMIUM is None, reason=MISSING)]

BEGIN = """async () => {
  document.body.innerHTML = '<div id=list><p id=no-runs></p><table id=runs><thead></thead><tbody></tbody></table></div>';
  const { List } = await import("/list.js");
  const run = (name, step) => ({ run: name.repeat(64), name, phase: "open", reason: "", step, steps: 9000, loss: 3, peers: 2 });
  window.show = (step, names) => new List().show({ runs: [...names].map((name) => run(name, step)) });
  window.show(1, "abc");
}"""


@pytest.fixture(scope="module")
def page() -> Iterator[Any]:
    with files_of(Path(STATIC)) as url, chromium() as browser, tab(browser, f"{url}words.js") as page:
        yield page


def test_a_focused_link_stays_focused_and_leads_to_its_run_whatever_comes_before_it(page: Any) -> None:
    page.evaluate(BEGIN)
    page.evaluate("() => { window.link = document.querySelectorAll('#runs a')[1]; link.focus(); }")
    for step, names in enumerate(("abc", "xabc", "cxb", "b", "yb"), 2):
        page.evaluate("([step, names]) => show(step, names)", [step, names])
        assert page.evaluate("() => document.activeElement === link && link.isConnected"), names
        assert page.evaluate("() => link.getAttribute('href')") == "#" + "b" * 64
        assert (
            page.evaluate("() => [...document.querySelectorAll('#runs a')].map((a) => a.textContent).join('')") == names
        )
        assert f"{step} of 9,000" in page.inner_text("#runs")


def test_a_selection_survives_and_a_click_that_began_before_an_event_ends_on_the_same_element(page: Any) -> None:
    page.evaluate(BEGIN)
    page.evaluate("""() => {
      const name = document.querySelectorAll("#runs a")[2];
      getSelection().selectAllChildren(name);
      window.clicks = [];
      name.addEventListener("click", (event) => { event.preventDefault(); clicks.push(event.target.textContent); });
    }""")
    box = page.locator("#runs a").nth(2).bounding_box()
    page.evaluate("() => show(7, 'abc')")
    assert page.evaluate("() => getSelection().toString()") == "c"
    page.mouse.move(box["x"] + 2, box["y"] + 2)
    page.mouse.down()
    page.evaluate("() => show(8, 'abc')")
    page.mouse.up()
    assert page.evaluate("() => clicks") == ["c"]
