"""Take the pictures of the page that learns, examples/browser, for docs/images.

    python tools/browser_pictures.py FOLDER

Run by hand, as one of the commands for pictures in docs/development.md.  It takes npm, which fetches onnxruntime-web,
and a Chromium that playwright finds, and about a minute.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path += [str(Path(__file__).resolve().parents[1] / folder) for folder in ("tests/lib", "examples/browser")]

from browser import DIGITS, NARROW, WIDE, chromium, draw, name, opened, served
from make_page import build
from playwright.sync_api import Page


def take_pictures(folder: Path) -> None:
    """Take pictures at the start, while a drawing is read, and after learning from some and from the page's digits.

    Each is taken wide and light, and narrow and dark."""
    with tempfile.TemporaryDirectory() as built:
        build(Path(built))
        with served(Path(built)) as address, chromium() as browser:
            for form, size, scheme in (("wide", WIDE, "light"), ("narrow", NARROW, "dark")):
                page = opened(browser.new_page(viewport=size, color_scheme=scheme), address)  # type: ignore[arg-type]

                def take(moment: str, form: str = form, page: Page = page) -> None:
                    """Take a picture of the page in this form."""
                    page.mouse.move(0, 0)
                    page.screenshot(path=folder / f"page-{form}-{moment}.png")

                take("start")
                draw(page, DIGITS[3])
                page.locator(".row.read").nth(7).wait_for()  # all have been
                if form == "narrow":
                    page.evaluate("document.querySelector('.read').scrollIntoView()")
                take("drawn")
                page.get_by_role("button", name="Forget everything").click()
                page.get_by_text("It knows nothing now").wait_for()
                for digit in (3, 7, 4):
                    page.get_by_role("button", name="Clear").click()
                    draw(page, DIGITS[digit])
                    name(page, digit)
                page.get_by_role("button", name="Practise 100 steps").click()
                page.get_by_text("Practised 100 steps.").wait_for()
                page.evaluate("document.querySelector('.learn').scrollIntoView()")
                take("learned")


if __name__ == "__main__":
    take_pictures(Path(sys.argv[1]))
