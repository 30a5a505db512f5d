"""Data parallel training: the gradients of one batch from several processes, on one machine or on several.

scikit-learn brings 1797 handwritten digits of 8 by 8 pixels.  A bidirectional LSTM, the drop-in for PyTorch's, reads
each one row by row, and a linear layer names the digit.  Each process computes its share of every batch, and
DistributedDataParallel averages the gradients over gloo, which needs no GPU.  Before training, the example compares
them with the gradients of one process on the whole batch.  All processes hold all digits.  If your data are too many
for that, let each process read a part of its own.

    pip install ".[examples,torch]"
    python examples/ddp.py [epochs]                               # one process
    torchrun --nproc-per-node 2 examples/ddp.py [epochs]          # two

On two machines, one process each, run this on both.  The first is node 0, FIRST is its name or address, and port 29500
must be open there; torchrun sets the rest.

    torchrun --nnodes 2 --node-rank 0 --master-addr FIRST --nproc-per-node 1 examples/ddp.py
    torchrun --nnodes 2 --node-rank 1 --master-addr FIRST --nproc-per-node 1 examples/ddp.py

If gloo takes the wrong network card, name the right one in the environment variable GLOO_SOCKET_IFNAME.  With one
process on a machine, blockcell uses all of its CPUs.  Where there are several, torchrun gives each one thread, unless
OMP_NUM_THREADS is set.
"""

import copy
import os
import sys
import time

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from blockcell.torch import LSTM

EPOCHS, BATCH, HIDDEN, LEARNING_RATE, TRAINED_ON = 10, 50, 64, 0.01, 1500


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = LSTM(8, HIDDEN, batch_first=True, bidirectional=True)
        self.name = nn.Linear(2 * HIDDEN, 10)

    def forward(self, x):
        _, (h, _) = self.rnn(x)
        return self.name(torch.cat([*h], dim=1))  # the last states of both directions


def summed(*numbers):
    """The sums over all processes."""
    total = torch.tensor(numbers, dtype=torch.float64)
    dist.all_reduce(total)
    return total.tolist()


def loss_of(model, x, label, share):
    """Of this process' share of a batch: a sum that, averaged over the processes, is the mean over the batch."""
    return cross_entropy(model(x[share]), label[share], reduction="sum") * dist.get_world_size() / len(x)


def compare(model, x, label, share):
    """The largest difference between a gradient and that of one process on the whole batch, and the largest entry."""
    alone = copy.deepcopy(model.module)
    cross_entropy(alone(x), label).backward()
    loss_of(model, x, label, share).backward()
    pairs = [(p.grad, q.grad) for p, q in zip(model.parameters(), alone.parameters(), strict=True)]
    return max((p - q).abs().max().item() for p, q in pairs), max(q.abs().max().item() for _, q in pairs)


def main(epochs=EPOCHS):
    """In each process: compare gradients, then train."""
    rank, processes = dist.get_rank(), dist.get_world_size()
    share = slice(rank, None, processes)
    report = print if rank == 0 else lambda line: None

    digits = load_digits()
    x, label = torch.tensor(digits.images / 16, dtype=torch.float32), torch.tensor(digits.target)
    x, x_new, label, label_new = x[:TRAINED_ON], x[TRAINED_ON:], label[:TRAINED_ON], label[TRAINED_ON:]
    torch.manual_seed(0)
    model = DistributedDataParallel(Reader())  # which gives all processes the parameters of the first
    optimizer = torch.optim.Adam(model.parameters(), LEARNING_RATE)

    difference, largest = compare(model, x[:BATCH], label[:BATCH], share)
    report(f"processes: {processes}; gradients differ from one's by {difference:.1e}, largest entry {largest:.1e}")
    if difference > 1e-6 * largest:
        raise SystemExit("They differ by more than rounding")

    start = time.perf_counter()
    for epoch in range(1, epochs + 1):
        total = 0.0
        shuffled = torch.randperm(TRAINED_ON, generator=torch.Generator().manual_seed(epoch))  # the same in all
        for rows in shuffled.split(BATCH):
            optimizer.zero_grad()
            loss = loss_of(model, x[rows], label[rows], share)
            loss.backward()
            optimizer.step()
            total += loss.item() * len(rows)
        with torch.inference_mode():
            right = (model.module(x_new[share]).argmax(dim=1) == label_new[share]).sum().item()
        total, right = summed(total, right)
        report(
            f"epoch {epoch:2}, {time.perf_counter() - start:4.1f} s: loss {total / processes / TRAINED_ON:.4f}, "
            f"accuracy on new digits {right / len(x_new):.3f}"
        )


if __name__ == "__main__":
    if dist.is_torchelastic_launched():  # by torchrun
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    main(*map(int, sys.argv[1:]))
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # past the end of Python, where a thread of gloo's that frees a tensor may abort (PyTorch 2.14)
