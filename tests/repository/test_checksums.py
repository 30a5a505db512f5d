"""`checksums.py`, which says whether a change keeps all bits, notices when one does not."""

import json
import sys
from pathlib import Path

import checksums
import numpy as np
import pytest


def test_compare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """What is recorded of a level is compared, each time in another process."""
    file = tmp_path / "recorded.json"
    info = checksums.blockcell.build_info()
    monkeypatch.setattr(checksums.blockcell, "build_info", lambda: info | {"supported_levels": [info["level"]]})
    monkeypatch.setattr(sys, "argv", ["checksums.py", "record", str(file), "--cases", "1"])
    checksums.main()
    recorded = json.loads(file.read_text())
    cases = sum(len(names) for kind, (_, names, _) in checksums.KINDS.items() if kind != "PyTorch")
    assert len(recorded["checksums"]) == cases and recorded["levels"] == [info["level"]]
    changed, missing, *_ = recorded["checksums"]
    recorded["checksums"][changed][0] = "0"
    recorded["checksums"]["another case"] = recorded["checksums"].pop(missing)
    file.write_text(json.dumps(recorded))
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["checksums.py", "compare", str(file)])
    with pytest.raises(SystemExit, match="True"):
        checksums.main()
    assert set(capsys.readouterr().out.splitlines()[1:-1]) == {
        f"{changed}: other bits in results [0]",
        f"{missing}: found here, but not recorded",
        "another case: recorded, but not found here",
    }


def test_checksum() -> None:
    """One bit, the order, the shape and the dtype count."""
    one = np.arange(6, dtype=np.float32)
    flipped = one.copy()
    flipped.view(np.uint8)[5] ^= 1
    values = [one, flipped, one[::-1], one.reshape(2, 3), one.view(np.int32)]
    assert len({checksums.checksum(value) for value in values}) == len(values)


def test_checksum_of_nan() -> None:
    """Its sign and payload do not count, its place does."""
    one = np.array([0, np.nan, 1], np.float32)
    other = one.view(np.uint32) ^ np.array([0, 0x80000001, 0], np.uint32)
    assert checksums.checksum(one) == checksums.checksum(other.view(np.float32))
    assert checksums.checksum(one) != checksums.checksum(one[[1, 0, 2]])
