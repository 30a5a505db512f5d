"""The project's size, which one maintainer must be able to read: a budget for each room.

Who raises a budget does so in a commit of its own, which names the user who asked.
"""

import pytest
from tracked import ROOT, tracked_files

LINES = {  # of code, comments and blank lines; a file counts in the longest of the folders that contain it
    "pyx": 11900,
    "blockcell": 12240,
    "blockcell/convert": 6204,
    "blockcell/tensorflow": 8018,
    "onnx_export": 5500,
    "tests": 42827,
    "tools": 3735,
    "benchmarks": 3790,
    "examples": 2870,
    "docs": 123,
    "": 313,
}
PAGES = 350_000  # bytes of Markdown
SUFFIXES = {".py", ".pyi", ".pyx", ".pxd", ".h", ".c", ".js", ".css", ".html"}


@pytest.mark.parametrize("room", LINES)
def test_lines(room):
    rooms = {file: max((name for name in LINES if f"{file}".startswith(name)), key=len) for file in tracked_files()}
    files = [ROOT / file for file, its_room in rooms.items() if its_room == room and file.suffix in SUFFIXES]
    lines = sum(file.read_bytes().count(b"\n") for file in files if file.exists())
    assert lines <= LINES[room], f"{room or 'the root'} has {lines - LINES[room]} lines more than its budget"


def test_pages():
    size = sum((ROOT / file).stat().st_size for file in tracked_files() if file.suffix == ".md")
    assert size <= PAGES, f"the pages have {size - PAGES} bytes more than their budget"
