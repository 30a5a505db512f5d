"""Random models of Keras 2, as SavedModels and as frozen graphs: right, or refused for what no layer has.

`pytest -m peers`, with tensorflow-cpu and tf_keras in .venv.
"""

from __future__ import annotations

import pytest
from keras2_models import import_keras, run_case
from tf_peers import CASES

pytestmark = pytest.mark.peers


@pytest.fixture(scope="module")
def keras():
    try:
        return import_keras()
    except ImportError:
        pytest.skip("there is no Keras 2")


@pytest.mark.parametrize("case", range(CASES))
def test_random_models(keras, case, tmp_path, seed):
    drawn, verdicts = run_case(keras, seed, case, tmp_path)
    print(drawn.model.get_config())
    for verdict, reason in verdicts.values():
        assert verdict == ("refused" if drawn.refused else "right"), reason
        assert verdict == "right" or "activation" in reason
