"""The page of examples/browser in a browser, for its tests."""

from __future__ import annotations

import functools
import http.server
import math
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, Page, sync_playwright

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "examples" / "browser"
SOFTWARE = ["--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader"]  # a WebGPU that computes on the CPU
WIDE, NARROW = {"width": 1100, "height": 820}, {"width": 360, "height": 740}
Strokes = list[list[tuple[float, float]]]


def arc(x: float, y: float, width: float, height: float, first: int, last: int) -> list[tuple[float, float]]:
    """Return points of an ellipse around x, y, from one angle to another, in degrees; clockwise, as y is downwards."""
    angles = [math.radians(first + (last - first) * k / 24) for k in range(25)]
    return [(x + width * math.cos(angle), y + height * math.sin(angle)) for angle in angles]


DIGITS: list[Strokes] = [
    [arc(0.5, 0.5, 0.2, 0.35, -90, 270)],
    [[(0.38, 0.3), (0.52, 0.15), (0.52, 0.85)]],
    [[*arc(0.5, 0.33, 0.18, 0.18, -170, 30), (0.32, 0.85), (0.72, 0.85)]],
    [[*arc(0.48, 0.32, 0.17, 0.17, -150, 90), *arc(0.48, 0.67, 0.2, 0.18, -90, 150)]],
    [[(0.5, 0.12), (0.3, 0.6), (0.72, 0.6)], [(0.6, 0.4), (0.58, 0.88)]],
    [[(0.68, 0.15), (0.4, 0.15), (0.36, 0.45), *arc(0.48, 0.64, 0.2, 0.21, -110, 140)]],
    [[(0.6, 0.12), (0.42, 0.35), *arc(0.5, 0.66, 0.17, 0.2, 180, -180)]],
    [[(0.3, 0.15), (0.7, 0.15), (0.45, 0.88)], [(0.38, 0.52), (0.66, 0.52)]],
    [[*arc(0.5, 0.32, 0.15, 0.17, 90, -270), *arc(0.5, 0.68, 0.18, 0.19, -90, 270)]],
    [[*arc(0.48, 0.34, 0.17, 0.2, 0, -360), (0.65, 0.34), (0.6, 0.88)]],
]
"""Each digit as somebody might draw it, on an area of 1 x 1."""


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve a folder as `python -m http.server` does, and yield its address."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=folder)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def chromium() -> Iterator[Browser]:
    """Start the system's Chromium or Chrome, or else the one that playwright has installed, if any."""
    paths = [path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=paths[0] if paths else None, args=SOFTWARE)
        yield browser
        browser.close()


def opened(page: Page, address: str) -> Page:
    """Open an address, and return the page when it is ready."""
    page.goto(address)
    page.get_by_text("Ready.").wait_for()
    return page


def draw(page: Page, strokes: Strokes) -> None:
    """Draw with the mouse, after what there is."""
    pad = page.locator("#pad")
    pad.scroll_into_view_if_needed()
    box = pad.bounding_box()
    assert box is not None
    for stroke in strokes:
        (first, *points) = [(box["x"] + box["width"] * x, box["y"] + box["height"] * y) for x, y in stroke]
        page.mouse.move(*first)
        page.mouse.down()
        for point in points:
            page.mouse.move(*point)
        page.mouse.up()


def name(page: Page, digit: int) -> str:
    """Say what is drawn; gives what the page says once it has learned that."""
    page.get_by_role("button", name=f"It is a {digit}").click()
    page.get_by_text(f"sure that this is a {digit};").wait_for()
    return page.locator("#status").inner_text()
