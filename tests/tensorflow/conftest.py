"""What the tests with TensorFlow share."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(scope="session")
def tf():
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    return pytest.importorskip("tensorflow")
