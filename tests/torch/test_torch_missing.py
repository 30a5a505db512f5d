"""blockcell without PyTorch: it is not imported, and what needs it says how to install it."""

from fresh import printed


def test_import():
    code = """
import sys

sys.modules["torch"] = None  # as if it were not installed
import blockcell

assert "blockcell.torch" not in sys.modules
try:
    blockcell.torch
except ImportError as error:
    print(error)
try:
    import blockcell.torch
except ImportError as error:
    print(error)
"""
    said = "blockcell.torch needs PyTorch: pip install torch ("
    lines = printed(code).splitlines()
    assert [line.startswith(said) for line in lines] == [True, True]
