"""Draw models of Keras 2, save them, and count what blockcell.tensorflow reads right, what it refuses, what is wrong.

    python tools/keras2_verdicts.py [cases [seed [first case]]]

Run by hand after a change of blockcell/tensorflow; `pytest -m peers` runs a few of the same cases.  It needs
tensorflow-cpu with tf_keras, or a TensorFlow up to 2.15, whose tf.keras is Keras 2.  A case takes some seconds.
"""

from __future__ import annotations

import sys
import tempfile
import traceback
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "lib"))

from keras2_models import FORMS, import_keras, run_case


def main() -> None:
    """Draw cases, judge each, print those that are not right, and count all verdicts."""
    cases, seed, first = (*map(int, sys.argv[1:]), *(50, 0, 0)[len(sys.argv) - 1 :])
    keras = import_keras()
    counts: dict[str, Counter[str]] = {form: Counter() for form in FORMS}
    for case in range(first, first + cases):
        with tempfile.TemporaryDirectory() as folder:
            try:
                drawn_model, verdicts = run_case(keras, seed, case, Path(folder))
            except Exception:  # of the draw: it shows which case
                print(case, "failed:", traceback.format_exc().splitlines()[-1], flush=True)
                traceback.print_exc()
                continue
        for form, (verdict, reason) in verdicts.items():
            counts[form]["refused, as drawn" if drawn_model.refused and verdict == "refused" else verdict] += 1
            if verdict != "right":
                print(case, form, verdict, reason, drawn_model.text, sep=" | ", flush=True)
    print(f"seed {seed}:", {form: dict(count) for form, count in counts.items()})


if __name__ == "__main__":
    main()
