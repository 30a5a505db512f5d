"""Random networks that TensorFlow and Keras write: the layer of all cells is right, refused, or has a remark.

Those of Keras 2, as SavedModels and as frozen graphs, are right, or refused for what no layer has. `pytest -m peers`,
with tensorflow-cpu, keras and tf_keras in .venv.
"""

from __future__ import annotations

import numpy as np
import pytest
from keras2_models import import_keras, run_case
from tf_connections import draw_graph, draw_keras, judge
from tf_peers import CASES

pytestmark = pytest.mark.peers
_MOST_DRAWS = 20  # until the parts of a network fit together


@pytest.mark.parametrize("case", range(CASES))
@pytest.mark.filterwarnings("ignore")
def test_random_connections(tf, case, tmp_path, seed):
    """A third each of Keras 3, Keras 2 and TensorFlow 1."""
    keras = pytest.importorskip(("keras", "tf_keras")[case % 3]) if case % 3 < 2 else None
    for attempt in range(_MOST_DRAWS):
        g = np.random.default_rng([seed, case, attempt])
        if keras is not None:
            keras.backend.clear_session()
        drawn = draw_graph(tf, g, tmp_path) if keras is None else draw_keras(tf, keras, g, tmp_path)
        if drawn is not None:
            break
    verdict, why = judge(drawn)
    print(drawn.description, "|", verdict, "|", why)
    assert verdict in ("right", "refused", "remarked, and right", "remarked, and wrong")


@pytest.fixture(scope="module")
def keras():
    try:
        return import_keras()
    except ImportError:
        pytest.skip("there is no Keras 2")


@pytest.mark.parametrize("case", range(CASES))
def test_random_models(keras, case, tmp_path, seed):
    drawn, verdicts = run_case(keras, seed, case, tmp_path)
    for verdict, reason in verdicts.values():
        assert verdict == ("refused" if drawn.refused else "right"), reason
        assert verdict == "right" or "activation" in reason or "is no RNN, LSTM or GRU" in reason
