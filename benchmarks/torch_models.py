"""Train two PyTorch models from start to finish, with torch.nn's layers and with blockcell.torch's: seconds, losses.

Needed by: docs/torch.md

    python benchmarks/torch_models.py [--epochs 5] [--models characters speech]

* characters: predicts the next character of the texts that Python's help() shows (pydoc_data, part of Python), with the
  sizes of char-rnn: an embedding, two LSTM layers of 128 cells, a linear layer; 50 rows of 50 steps.
* speech: tells nine speakers by how they say two vowels, from twelve cepstrum coefficients of 7 to 29 frames (Japanese
  Vowels, which the package sktime ships: `pip install --no-deps sktime`), with two bidirectional LSTM layers of 256
  cells on packed sequences; 30 rows.

Both train with Adam from the same seed, each in a process of its own, and take turns after every epoch; a loss stands
twice where they differ.  A star says that the machine was disturbed in an epoch (turns.py).  `replace` puts blockcell's
layers into the model.
"""

from __future__ import annotations

import importlib.util
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from turns import CPUS, Worker, answer, ask_all, make_parser, open_workers, print_heads, print_row, run_program, watch

CANDIDATES = ("torch.nn", "blockcell.torch")
CHARACTERS = 250_000
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


MODELS = {"characters": make_characters, "speech": make_speech}


# ----------------------------------------------------------------------------------------------------------- the worker
def work(candidate: str, name: str) -> None:
    """Train an epoch for each question; answer with its seconds, its mean loss, and loss and hits on test batches."""
    import torch

    torch.set_num_threads(CPUS)
    torch.manual_seed(0)
    model, training, testing = MODELS[name]()
    if candidate == "blockcell.torch":
        import blockcell.torch

        blockcell.torch.replace(model)
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


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--models", nargs="+", default=[*MODELS], choices=[*MODELS])
    options = parser.parse_args()
    import torch

    import blockcell

    about = blockcell.build_info()
    print(f"{CPUS} CPUs, {about['cpu']}, level {about['level']}, torch {torch.__version__}")
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
