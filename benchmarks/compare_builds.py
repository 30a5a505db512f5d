"""How many times as long one build of the kernels takes as another, such as that of another compiler.

    git clone . /elsewhere && (cd /elsewhere && CC=clang python setup.py build_ext --inplace)
    python benchmarks/compare_builds.py . /elsewhere

The arguments are two checkouts, built in place.  Each runs in a process of its own and the two are asked in turn, as in
against_tensorflow.py; a ratio is the median of the rounds'.
"""

import statistics
import sys

from against_tensorflow import ask, start_worker

POINTS = [
    ("GRUBlockCell", {"T": 1, "B": 1, "I": 32, "H": 32}),
    ("GRUBlockCell", {"T": 1, "B": 16, "I": 512, "H": 512}),
    ("LSTMBlockCell", {"T": 1, "B": 16, "I": 512, "H": 512}),
    ("BlockLSTM", {"T": 20, "B": 16, "I": 128, "H": 128}),
    ("BlockLSTM", {"T": 20, "B": 16, "I": 256, "H": 256}),
    ("BlockLSTMGrad", {"T": 20, "B": 16, "I": 128, "H": 128}),
    ("BlockLSTMGrad", {"T": 20, "B": 16, "I": 256, "H": 256}),
]
ROUNDS = 7


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    first, second = (start_worker("blockcell", PYTHONPATH=folder) for folder in sys.argv[1:])
    print(f"{'op':14}{'T':>4}{'B':>4}{'H':>5}{'first':>12}{'second':>12}   second / first")
    for name, sizes in POINTS:
        rounds = [(ask(first, name, sizes), ask(second, name, sizes)) for _ in range(ROUNDS)]
        one, other = (statistics.median(times) * 1e6 for times in zip(*rounds, strict=True))
        ratio = statistics.median(b / a for a, b in rounds)
        print(f"{name:14}{sizes['T']:4}{sizes['B']:4}{sizes['H']:5}{one:9.1f} us{other:9.1f} us{ratio:9.2f}")
    first.stdin.close()
    second.stdin.close()


if __name__ == "__main__":
    main()
