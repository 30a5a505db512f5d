"""A cart and a pole whose velocities nobody sees: recurrent PPO over whole rollouts, and beside it the usual loop.

The task is Barto, Sutton and Anderson's ("Neuronlike adaptive elements", 1983): keep a pole upright on a cart by
pushing it left or right, for 500 steps at most.  The policy sees the cart's position and the pole's angle alone,
so it has to remember how both have moved.  It is an LSTM, trained by proximal policy optimization (Schulman et al.,
2017).

Episodes start in the middle of a rollout, where the state has to be zero again.  torch.nn.LSTM cannot do that within a
sequence, so recurrent PPO loops over the steps, as in `by_steps`.  Here one call takes the rollout, with `reset=` where
episodes start.  Three updates of each kind with the same seed come first: episodes are the same, and losses are but for
rounding.

    pip install ".[torch]"
    python examples/cartpole.py
"""

import sys
import time

import numpy as np
import torch
from torch import nn

import blockcell.torch

CARTS, STEPS, HIDDEN, UPDATES = 16, 128, 64, 80
EPOCHS, PARTS, LEARNING_RATE = 4, 4, 2e-3
DISCOUNT, DECAY, CLIP, ENTROPY, LARGEST_NORM = 0.99, 0.95, 0.2, 0.01, 0.5
LIMIT, EDGE, TILT = 500, 2.4, np.radians(12)  # steps of an episode; where it fails


class Carts:
    """Carts side by side, each with episodes of its own."""

    def __init__(self, rng):
        self.rng, self.finished = rng, []  # the lengths of episodes that have ended
        self.state, self.age = np.zeros((4, CARTS)), np.zeros(CARTS, int)
        self.begin(np.ones(CARTS, bool))

    def begin(self, ended):
        """New episodes; `start` says of which carts."""
        self.finished += self.age[ended & (self.age > 0)].tolist()
        self.state[:, ended] = self.rng.uniform(-0.05, 0.05, (4, ended.sum()))
        self.age[ended], self.start = 0, ended

    def seen(self):
        """Positions and angles, [B,2]."""
        return torch.tensor(self.state[::2].T / (EDGE, TILT), dtype=torch.float32)

    def step(self, right):
        _, speed, angle, turning = self.state
        push = (np.where(right, 10, -10) + 0.05 * turning**2 * np.sin(angle)) / 1.1
        lever = 0.5 * (4 / 3 - 0.1 * np.cos(angle) ** 2 / 1.1)
        turns_faster = (9.8 * np.sin(angle) - np.cos(angle) * push) / lever
        faster = push - 0.05 * turns_faster * np.cos(angle) / 1.1
        self.state += 0.02 * np.array([speed, faster, turning, turns_faster])
        self.age += 1
        self.begin((abs(self.state[0]) > EDGE) | (abs(self.state[2]) > TILT) | (self.age == LIMIT))


def whole(lstm, seen, state, start):
    return lstm(seen, state, reset=start)


def by_steps(lstm, seen, state, start):
    """What has to be written with torch.nn.LSTM."""
    outputs = []
    for x, new in zip(seen, start, strict=True):
        state = tuple([s * ~new[:, None] for s in state])
        y, state = lstm(x[None], state)
        outputs.append(y)
    return torch.cat(outputs), state


class Policy(nn.Module):
    """The logit of a push to the right, and the value of what is to come, at each step."""

    def __init__(self, kind, read):
        super().__init__()
        self.lstm, self.read, self.heads = kind(2, HIDDEN), read, nn.Linear(HIDDEN, 2)

    def forward(self, seen, state, start):
        y, state = self.read(self.lstm, seen, state, start)
        logit, value = self.heads(y).unbind(-1)
        return logit, value, state


@torch.no_grad()
def rollout(policy, carts, state):
    """Steps of all carts [T,B,...], and the state after them."""
    steps = []
    for _ in range(STEPS):
        seen, start = carts.seen(), torch.from_numpy(carts.start)
        logit, value, state = policy(seen[None], state, start[None])
        right = torch.from_numpy(carts.rng.random(CARTS)) < logit[0].sigmoid()
        carts.step(right.numpy())
        log = nn.functional.logsigmoid(torch.where(right, logit[0], -logit[0]))
        steps.append((seen, start, right, log, value[0]))
    _, value, _ = policy(carts.seen()[None], state, torch.from_numpy(carts.start)[None])
    return [torch.stack(parts) for parts in zip(*steps, strict=True)], value[0], torch.from_numpy(carts.start), state


def advantages(value, start, last_value, last_start):
    """How much better it went than expected; the reward of a step is 1 - DISCOUNT, so values are up to 1."""
    found, more = torch.empty_like(value), torch.zeros(CARTS)
    following = torch.cat([value[1:], last_value[None]])
    goes_on = ~torch.cat([start[1:], last_start[None]])
    for t in reversed(range(STEPS)):
        more = 1 - DISCOUNT + goes_on[t] * DISCOUNT * (following[t] + DECAY * more) - value[t]
        found[t] = more
    return found


def update(policy, optimizer, first, seen, start, right, log, value, advantage, rng):
    """Some passes over a rollout that began with the state `first`; returns the losses of its parts."""
    losses, wanted = [], value + advantage
    for _ in range(EPOCHS):
        for rows in np.split(rng.permutation(CARTS), PARTS):
            logit, guess, _ = policy(seen[:, rows], tuple([s[:, rows] for s in first]), start[:, rows])
            chosen, gain = torch.where(right[:, rows], logit, -logit), advantage[:, rows]
            gain = (gain - gain.mean()) / (gain.std() + 1e-8)
            ratio = (nn.functional.logsigmoid(chosen) - log[:, rows]).exp()
            surprise = nn.functional.binary_cross_entropy_with_logits(logit, logit.sigmoid())
            better = torch.minimum(ratio * gain, ratio.clamp(1 - CLIP, 1 + CLIP) * gain).mean()
            loss = 0.5 * (guess - wanted[:, rows]).square().mean() - better - ENTROPY * surprise
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(policy.parameters(), LARGEST_NORM)
            optimizer.step()
            losses.append(loss.item())
    return losses


def train(kind, read, updates, seed, report=None):
    """Returns the losses of the parts of the first update, the lengths of all episodes, and steps a second that updates
    took."""
    torch.manual_seed(seed)
    rng, policy = np.random.default_rng(seed), Policy(kind, read)
    optimizer, carts = torch.optim.Adam(policy.parameters(), LEARNING_RATE), Carts(rng)
    state, losses, seconds = (torch.zeros(1, CARTS, HIDDEN),) * 2, [], 0.0
    for number in range(1, updates + 1):
        first, done = state, len(carts.finished)
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * (1 - (number - 1) / updates)
        (seen, start, right, log, value), *last, state = rollout(policy, carts, state)
        advantage = advantages(value, start, *last)
        begin = time.perf_counter()
        losses.append(update(policy, optimizer, first, seen, start, right, log, value, advantage, rng))
        seconds += time.perf_counter() - begin
        if report and number % max(1, updates // 10) == 0:
            report(f"update {number:3}: {np.mean(carts.finished[done:]):5.1f} steps an episode")
    return losses[0], carts.finished, updates * STEPS * CARTS / seconds


def main(updates=UPDATES, seed=0, report=print):
    """Compare, then train; returns the lengths of all episodes."""
    loop, call = (train(*way, 3, seed) for way in ((nn.LSTM, by_steps), (blockcell.torch.LSTM, whole)))
    for name, (losses, _, rate) in (("nn.LSTM in a loop", loop), ("reset=", call)):
        report(f"{name:18}: loss {losses[0]:.6f} to {losses[-1]:.6f}, {rate:,.0f} steps a second of the update")
    report(f"{call[2] / loop[2]:.1f} times as fast; the same {len(call[1])} episodes: {call[1] == loop[1]}")
    start = time.perf_counter()
    _, episodes, _ = train(blockcell.torch.LSTM, whole, updates, seed, report)
    report(f"{time.perf_counter() - start:.1f} s; the last 100 episodes: {np.mean(episodes[-100:]):.1f} steps")
    return episodes


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
