"""A keyword in a stream of sound: an LSTM says at every hundredth of a second whether "computer" was just spoken.

espeak-ng makes the sound: 32 words in 15 voices, each at two speeds and pitches.  Sequences of three seconds are put
together from them, with pauses and noise.  Every 10 ms there are the logarithms of the energies in 24 bands, of the
last 23 ms alone, so that nothing looks ahead.  The network is trained to believe in the keyword from just before its
end to 150 ms after it, and not to believe at all other times; in the middle of the word it may do either.

Afterwards a stream listens to five voices that it has never heard, frame by frame as from a microphone, for two minutes
each.  It has heard the keyword where it believes in it for 50 ms.

    apt install espeak-ng; pip install ".[examples]"
    python examples/keyword_spotting.py [keyword.png]
"""

import subprocess
import sys
import time

import numpy as np
from matplotlib.figure import Figure

from blockcell import LSTM, Dense, Stack, optim
from blockcell.loss import softmax_cross_entropy

KEYWORD = "computer"
OTHERS = """commuter compare compass come confuse pewter tutor future water butter shooter later kitchen window yellow
garden music seven eleven open close listen morning paper river please table number winter hello stop""".split()
WHO = ("m1", "m3", "m7", "f2", "f4")
VOICES = [f"{accent}+{who}" for accent in ("en-us", "en-gb", "en-gb-scotland") for who in WHO]
NEW_VOICES = ["en-us+m5", "en-us+f3", "en-gb+m2", "en-gb+f5", "en-gb-scotland+m4"]
RATE, HOP, WINDOW, BANDS = 22050, 220, 512, 24  # of espeak-ng; samples; numbers per hop
HIDDEN, SEQUENCES, STEPS, ROWS, LENGTH, LEARNING_RATE = 64, 960, 400, 32, 300, 0.01
BEFORE, AFTER, NEEDED, LOUD = 5, 15, 5, 0.5  # hops around the keyword's end; hops of belief, and how much of it


def spoken(word, voice, speed, pitch):
    """A word as samples from -1 to 1, without the silence around it."""
    command = ["espeak-ng", "-v", voice, "-s", str(speed), "-p", str(pitch), "--stdout", word]
    wav = subprocess.run(command, check=True, capture_output=True).stdout
    samples = np.frombuffer(wav, np.int16, offset=44).astype(np.float32) / 32768  # behind the header
    loud = np.flatnonzero(abs(samples) > 0.01)
    return samples[loud[0] : loud[-1] + 1]


def vocabulary(voices, variants, rng):
    """Every word in every voice, and its samples: a list of the keyword's recordings, and one of the others'."""
    said = {True: [], False: []}
    for voice in voices:
        for word in [KEYWORD] * 4 + OTHERS:
            for _ in range(variants):
                samples = spoken(word, voice, rng.integers(120, 200), rng.integers(25, 75))
                said[word == KEYWORD].append((word, samples))
    return said[True], said[False]


def bands():
    """Triangles from 100 Hz to 8 kHz, evenly spaced in mel, over the frequencies of a window."""
    mel = np.linspace(*(2595 * np.log10(1 + np.array([100, 8000]) / 700)), BANDS + 2)
    edges = 700 * (10 ** (mel / 2595) - 1)
    at = np.fft.rfftfreq(WINDOW, 1 / RATE)
    low, middle, high = (edges[k : k + BANDS, None] for k in range(3))
    return np.clip(np.minimum((at - low) / (middle - low), (high - at) / (high - middle)), 0, None).astype(np.float32)


TRIANGLES, FADE = bands(), np.hanning(WINDOW).astype(np.float32)


def features(samples):
    """[T, BANDS]: the logarithm of the energy in each band, every HOP samples, of the WINDOW samples before."""
    frames = np.lib.stride_tricks.sliding_window_view(samples, WINDOW)[::HOP] * FADE
    energy = abs(np.fft.rfft(frames)) ** 2 @ TRIANGLES.T
    return (np.log(energy + 1e-3) / 3).astype(np.float32)


def sequence(length, keywords, others, rng):
    """Words, pauses and noise, so many hops long: features [T, BANDS], and each word with the hops from and to it."""
    size = length * HOP + WINDOW - 1
    samples, words, at = np.zeros(size, np.float32), [], int(rng.integers(0, RATE // 2))
    while at < size:
        among = keywords if rng.random() < 0.25 else others
        word, said = among[rng.integers(len(among))]
        if at + len(said) <= size:
            samples[at : at + len(said)] += said * rng.uniform(0.3, 1)
            words.append((word, at // HOP, (at + len(said) - WINDOW) // HOP))
        at += len(said) + int(rng.uniform(0.02, 0.6) * RATE)
    samples += rng.normal(0, rng.uniform(0.001, 0.01), size).astype(np.float32)
    return features(samples)[:length], words


def spans(words):
    """From where to where the keyword is spoken."""
    return [(first, end) for word, first, end in words if word == KEYWORD]


def training_set(count, keywords, others, rng):
    """Features [T,N,BANDS], whether to believe [T,N], and which of that counts [T,N]."""
    x, labels = np.empty((LENGTH, count, BANDS), np.float32), np.zeros((LENGTH, count), int)
    counts = np.ones((LENGTH, count), bool)
    for row in range(count):
        x[:, row], words = sequence(LENGTH, keywords, others, rng)
        for first, end in spans(words):
            counts[(first + end) // 2 : end + AFTER + 10, row] = False
            labels[end - BEFORE : end + AFTER, row] = 1
            counts[end - BEFORE : end + AFTER, row] = True
    return x, labels, counts


def train(net, x, labels, counts, steps, rng, report):
    memory = None
    for step in range(1, steps + 1):
        rows = rng.choice(x.shape[1], ROWS, replace=False)
        logits, _, tape = net.forward(x[:, rows])
        loss, d_logits = softmax_cross_entropy(logits, labels[:, rows], mask=counts[:, rows])
        _, _, grads = net.backward(tape, d_logits)
        grads, _ = optim.clip_global_norm(grads, 1.0)
        rate = LEARNING_RATE * (1 - step / (steps + 1))
        weights, memory = optim.adam(net.weights, grads, memory, learning_rate=rate)
        net.set_weights(**weights)
        if step % max(1, steps // 5) == 0:
            report(f"step {step:4}: cross-entropy {loss:.4f}")


def listen(net, x):
    """The belief in the keyword after each frame [T], frame by frame."""
    stream, belief = net.stream(), np.empty(len(x), np.float32)
    for t, frame in enumerate(x[:, None]):
        no, yes = stream.step(frame)[0]
        belief[t] = 1 / (1 + np.exp(no - yes))
    return belief


def heard(belief):
    """The hops at which it has believed for NEEDED hops, once for each time that it begins to."""
    sure = np.convolve(belief > LOUD, np.ones(NEEDED, int))[: len(belief)] == NEEDED
    return np.flatnonzero(sure & ~np.append(False, sure[:-1]))


def score(words, hops):
    """How many keywords there were and were heard, up to half a second after their end; and how often it was none."""
    found = [np.flatnonzero((hops >= (first + end) // 2) & (hops <= end + 50)) for first, end in spans(words)]
    right = {hop for each in found for hop in each}
    return len(found), sum(len(each) > 0 for each in found), len(hops) - len(right)


def main(path="keyword.png", sequences=SEQUENCES, steps=STEPS, new_voices=NEW_VOICES, seconds=120, report=print):
    """Train, listen to new voices and draw; returns keywords spoken, keywords heard and false alarms."""
    rng, start = np.random.default_rng(0), time.perf_counter()
    sounds = training_set(sequences, *vocabulary(VOICES, 2, rng), rng)
    report(f"{time.perf_counter() - start:.0f} s of making sound")
    net = Stack([LSTM.init(BANDS, HIDDEN, seed=0, forget_bias=1.0), Dense.init(HIDDEN, 2, seed=1)])
    start = time.perf_counter()
    train(net, *sounds, steps, rng, report)
    report(f"{time.perf_counter() - start:.0f} s of training")

    total = np.zeros(3, int)
    for voice in new_voices:
        x, words = sequence(seconds * RATE // HOP, *vocabulary([voice], 2, rng), rng)
        start = time.perf_counter()
        belief = listen(net, x)
        took = time.perf_counter() - start
        said, found, wrong = counts = score(words, heard(belief))
        report(f"{voice:20} heard {found} of {said}, {wrong} false alarms, {1e6 * took / len(x):.1f} us a frame")
        total += counts
    said, found, wrong = (int(count) for count in total)
    minutes = seconds * len(new_voices) / 60
    report(f"new voices: heard {found} of {said}, {wrong} false alarms in {minutes:.0f} minutes")
    draw(path, x, words, belief)
    report(f"The picture is {path}")
    return said, found, wrong


def draw(path, x, words, belief):
    """Eight seconds of the last voice, with two keywords and as many different words as there are."""
    length = min(len(x), 8 * RATE // HOP)

    def shown(first):
        return [each for each in words if first <= each[1] and each[2] < first + length]

    def variety(first):
        names = [word for word, _, _ in shown(first)]
        return min(names.count(KEYWORD), 2), len({*names})

    first = max(range(0, len(x) - length + 1, 50), key=variety)
    figure = Figure(figsize=(11, 5.5), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    second = HOP / RATE
    part = slice(first, first + length)
    top.imshow(x[part].T, aspect="auto", origin="lower", cmap="magma", extent=(0, length * second, 0, BANDS))
    top.set_title("A voice that is new to it: energy in 24 bands", pad=22)
    top.set(ylabel="band, low to high", yticks=[])
    for word, start, end in shown(first):
        middle, is_keyword = ((start + end) / 2 - first) * second, word == KEYWORD
        color, weight = ("tab:red", "bold") if is_keyword else ("black", "normal")
        top.text(middle, BANDS + 0.5, word, color=color, weight=weight, ha="center", va="bottom")
        if is_keyword:
            bottom.axvspan((start - first) * second, (end - first) * second, color="0.88", zorder=0)
    times = np.arange(length) * second
    bottom.fill_between(times, belief[part], color="tab:blue", alpha=0.4)
    bottom.plot(times, belief[part], color="tab:blue")
    bottom.set_title(f"Belief that {KEYWORD!r} was just spoken; grey: while it is")
    bottom.set(xlabel="seconds", ylabel="belief", ylim=(0, 1.05), xlim=(0, length * second))
    bottom.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main(*sys.argv[1:])
