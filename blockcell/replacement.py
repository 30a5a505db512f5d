"""What `blockcell.torch.replace` and `blockcell.keras.replace` report."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(repr=False)
class Report:
    """What `replace` or `restore` did to a model; its repr is for reading.

    Attributes
    ----------
    changed : dict of str to str
        The modules or layers that compute in another way now, by name, and what they are. A PyTorch model itself has
        the name "".
    left : dict of str to str
        The recurrent modules or layers that are as before, and why.
    """

    changed: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    action: str = "replaced"
    noun: str = "module"

    def __repr__(self) -> str:
        count = len(self.changed)
        first = f"{self.action} {count} {self.noun}{'s' * (count != 1)}{':' * (count > 0)}"
        lines = [first, *_report_lines(self.changed)]
        if self.left:
            lines += [f"left {len(self.left)}:", *_report_lines(self.left)]
        elif not self.changed:
            none = "that is an LSTM, GRU or RNN" if self.action == "replaced" else "that is replaced"
            lines[0] += f": the model has no {self.noun} {none}"
        return "\n".join(lines)


def _report_lines(parts: dict[str, str]) -> list[str]:
    return [f"  {name or '(the model)'}: {text}" for name, text in parts.items()]
