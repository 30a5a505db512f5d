"""Run whole PyTorch models with torch.nn's layers and with blockcell.torch's: training to a loss, and inference.

Needed by: README.md, docs/torch.md

    python benchmarks/torch_models.py [--epochs 5] [--models characters speech]    # training
    python benchmarks/torch_models.py --consensus [--chunks 100] [--rounds 5]      # inference, on one thread

* characters: predicts the next character of the texts that Python's help() shows (pydoc_data, part of Python), with the
  sizes of char-rnn: an embedding, two LSTM layers of 128 cells, a linear layer; 50 rows of 50 steps.
* speech: tells nine speakers by how they say two vowels, from twelve cepstrum coefficients of 7 to 29 frames (Japanese
  Vowels, which the package sktime ships: `pip install --no-deps sktime`), with two bidirectional LSTM layers of 256
  cells on packed sequences; 30 rows.

Both train with Adam from the same seed, each in a process of its own, and take turns after every epoch; a loss stands
twice where they differ.  A star says that the machine was disturbed in an epoch (turns.py).  `replace` puts blockcell's
layers into the model.

--consensus calls the network of medaka 2.1.0, Oxford Nanopore's consensus caller, on a batch of chunks as long as
medaka's, on one thread: seconds, the peak of the process' memory, and how many of the classes differ.  Weights and
features are random.
"""

from __future__ import annotations

import importlib.util
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from turns import (
    CPUS,
    Worker,
    answer,
    ask_all,
    make_parser,
    open_workers,
    print_heads,
    print_row,
    ratio_cell,
    run_program,
    watch,
)

CANDIDATES = ("torch.nn", "blockcell.torch")
CHARACTERS = 250_000
COLUMNS = 10_000  # of a chunk: medaka's --chunk_len; its --batch_size is 100 (medaka/medaka.py)
Batches = Callable[[], Iterator[tuple[Any, Any]]]


# ----------------------------------------------------------------------------------------------------------- the models
def make_characters() -> tuple[Any, Batches, Batches]:
    """Return a model that predicts characters, its training batches and its test batches."""
    from pydoc_data.topics import topics

    import torch

    text = "".join(topics.values())[:CHARACTERS]
    alphabet = sorted(set(text))
    number = {character: k for k, character in enumerate(alphabet)}
    codes = torch.tensor([number[character] for character in text])

    class CharacterModel(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = torch.nn.Embedding(len(alphabet), 64)
            self.rnn = torch.nn.LSTM(64, 128, num_layers=2, batch_first=True)
            self.linear = torch.nn.Linear(128, len(alphabet))

        def forward(self, x: Any) -> Any:
            return self.linear(self.rnn(self.embedding(x))[0]).flatten(0, 1)

    def batches(first: int, last: int) -> Batches:
        """Return the batches of a part of the text, in 50 rows."""
        rows = codes[first : last - (last - first) % 50].view(50, -1)

        def iterate() -> Iterator[tuple[Any, Any]]:
            for k in range(0, rows.shape[1] - 51, 50):
                yield rows[:, k : k + 50], rows[:, k + 1 : k + 51].flatten()

        return iterate

    split = len(codes) * 9 // 10
    return CharacterModel(), batches(0, split), batches(split, len(codes))


def read_utterances(name: str) -> tuple[list[Any], list[int]]:
    """Read the frames [T,12] of each utterance, and its speaker."""
    import torch

    spec = importlib.util.find_spec("sktime")
    if not spec:
        sys.exit("sktime is not installed")
    text = Path(spec.origin).with_name("datasets").joinpath("data", "JapaneseVowels", name).read_text()
    lines = [line.split(":") for line in text.partition("@data")[2].split()]
    frames = [torch.tensor([[float(v) for v in part.split(",")] for part in parts]).T for *parts, _ in lines]
    return frames, [int(parts[-1]) - 1 for parts in lines]


def make_speech() -> tuple[Any, Batches, Batches]:
    """Return a model that tells speakers, its training batches and its test batches."""
    import torch
    from torch.nn.utils.rnn import pack_sequence, pad_packed_sequence

    class SpeechModel(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = torch.nn.LSTM(12, 256, num_layers=2, bidirectional=True)
            self.linear = torch.nn.Linear(512, 9)

        def forward(self, x: Any) -> Any:
            y, lengths = pad_packed_sequence(self.rnn(x)[0])
            return self.linear(y.sum(0) / lengths[:, None])

    def batches(name: str, shuffled: bool) -> Batches:
        frames, speakers = read_utterances(name)

        def iterate() -> Iterator[tuple[Any, Any]]:
            order = torch.randperm(len(frames)) if shuffled else torch.arange(len(frames))
            for rows in order.split(30):
                x = pack_sequence([frames[k] for k in rows], enforce_sorted=False)
                yield x, torch.tensor([speakers[k] for k in rows])

        return iterate

    return SpeechModel(), batches("JapaneseVowels_TRAIN.ts", True), batches("JapaneseVowels_TEST.ts", False)


def make_consensus() -> Any:
    """Return a network with the sizes of medaka's `GRUModel` (medaka/architectures/gru.py in nanoporetech/medaka)."""
    import torch

    class ConsensusModel(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru = torch.nn.GRU(10, 128, num_layers=2, bidirectional=True, batch_first=True)
            self.linear = torch.nn.Linear(256, 5)

        def forward(self, x: Any) -> Any:
            return self.linear(self.gru(x)[0]).softmax(-1)

    return ConsensusModel().eval()


MODELS = {"characters": make_characters, "speech": make_speech}


# ---------------------------------------------------------------------------------------------------------- the workers
def work(candidate: str, name: str) -> None:
    """Answer questions about one of `MODELS`, or about the consensus."""
    import torch

    torch.manual_seed(0)
    if name == "consensus":
        torch.set_num_threads(1)
        model = make_consensus()
    else:
        torch.set_num_threads(CPUS)
        model, *batches = MODELS[name]()
    if candidate == "blockcell.torch":
        import blockcell.torch

        blockcell.torch.replace(model)
    if name == "consensus":
        answer_consensus(model)
    else:
        answer_epochs(model, *batches)


def answer_consensus(model: Any) -> None:
    """Call a batch of so many chunks for each question; answer with seconds, peak MiB so far, and a digit per class."""
    import torch

    def call(question: list[int]) -> tuple[float, float, str]:
        [chunks] = question
        x = torch.rand(chunks, COLUMNS, 10, generator=torch.Generator().manual_seed(1))
        start = time.perf_counter()
        with torch.inference_mode():
            classes = model(x).argmax(-1)
        spent = time.perf_counter() - start
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # Linux counts in KiB
        return spent, memory, (classes.flatten() + ord("0")).byte().numpy().tobytes().decode()

    answer(call)


def answer_epochs(model: Any, training: Batches, testing: Batches) -> None:
    """Train an epoch for each question; answer with its seconds, its mean loss, and loss and hits on test batches."""
    import torch

    optimizer = torch.optim.Adam(model.parameters(), 2e-3)

    def run_epoch(_: Any) -> tuple[float, float, float, float]:
        start = time.perf_counter()
        model.train()
        losses = []
        for x, labels in training():
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x), labels)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 5)
            optimizer.step()
            losses.append(loss.item())
        spent = time.perf_counter() - start
        model.eval()
        unseen, hits, count = 0.0, 0, 0
        with torch.no_grad():
            for x, labels in testing():
                logits = model(x)
                unseen += torch.nn.functional.cross_entropy(logits, labels, reduction="sum").item()
                hits += (logits.argmax(1) == labels).sum().item()
                count += len(labels)
        return spent, statistics.mean(losses), unseen / count, hits / count

    answer(run_epoch)


def compare_consensus(chunks: int, count: int) -> None:
    """Print a line for each round, and the classes that differ."""
    team = {candidate: Worker(__file__, "--work", candidate, "consensus") for candidate in CANDIDATES}
    with open_workers(team) as workers:
        heads = [f"{name}, {unit}" for unit in ("s", "MiB") for name in CANDIDATES]
        print_heads([f"{chunks} chunks, round", *heads, ""])
        guard, times = watch(workers.values()), []
        for number in range(1, count + 1):
            answers, marked = guard.round(1, partial(ask_all, workers, chunks))
            seconds, memory, classes = zip(*answers.values(), strict=True)
            times.append(seconds)
            cells = [*(f"{s:.1f}" for s in seconds), *(f"{mib:,.0f}" for mib in memory)]
            print_row([number, *cells, f"{seconds[0] / seconds[1]:.2f}x{'*' * marked}"])
        both = [*zip(*times, strict=True)]
        print_row(["median", *(f"{statistics.median(column):.1f}" for column in both), "", "", ratio_cell(*both)])
    differing = sum(a != b for a, b in zip(*classes, strict=True))
    print(f"{differing} of {chunks * COLUMNS:,} classes differ")


def main() -> None:
    parser = make_parser(__doc__, rounds=5)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--models", nargs="+", default=[*MODELS], choices=[*MODELS])
    parser.add_argument("--consensus", action="store_true", help="inference of medaka's network instead")
    parser.add_argument("--chunks", type=int, default=100, help=f"of {COLUMNS:,} columns, in one batch (100)")
    options = parser.parse_args()
    import torch

    import blockcell

    about = blockcell.build_info()
    print(f"{CPUS} CPUs, {about['cpu']}, level {about['level']}, torch {torch.__version__}")
    if options.consensus:
        compare_consensus(options.chunks, options.rounds)
        return
    for name in options.models:
        team = {candidate: Worker(__file__, "--work", candidate, name) for candidate in CANDIDATES}
        with open_workers(team) as workers:
            print()
            print_heads([f"{name}, epoch", "torch.nn, s", "blockcell.torch, s", "", "loss", "unseen: loss", "right"])
            total, guard = [0.0, 0.0], watch(workers.values())
            for epoch in range(1, options.epochs + 1):
                answers, marked = guard.round(CPUS, partial(ask_all, workers))
                theirs, ours = answers.values()
                total = [total[0] + theirs[0], total[1] + ours[0]]
                both = [", ".join(dict.fromkeys(f"{v:.4f}" for v in pair)) for pair in zip(theirs, ours, strict=True)]
                ratio = f"{theirs[0] / ours[0]:.2f}x{'*' * marked}"
                print_row([epoch, f"{theirs[0]:.2f}", f"{ours[0]:.2f}", ratio, *both[1:]])
            print_row(["all", f"{total[0]:.1f}", f"{total[1]:.1f}", f"{total[0] / total[1]:.2f}x", "", "", ""])


if __name__ == "__main__":
    run_program(main, work)
