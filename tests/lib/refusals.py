"""Calls that are refused, with the error as a traceback ends with it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def refusal(said: str, caller: str = "") -> Iterator[None]:
    """Expect an error: "ValueError: a part of its message", or all of it but for the name of the caller, if given."""
    name, _, message = said.partition(": ")
    with pytest.raises((TypeError, ValueError), match=re.escape(message)) as caught:
        yield
    assert type(caught.value).__name__ == name
    assert not caller or str(caught.value) == f"{caller}: {message}"
