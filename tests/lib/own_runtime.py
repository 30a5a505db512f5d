"""A copy of blockcell with an OpenMP runtime of its own, such as a wheel has that auditwheel has repaired."""

import shutil
from pathlib import Path

from fresh import printed

import blockcell

LOADED = """
def loaded():
    with open("/proc/self/maps") as file:
        return sorted({line.split()[-1] for line in file if "/libgomp" in line})
"""
NAME, OWN = b"libgomp.so.1\0", b"libgomp.so.9\0"  # of the same length, so that files keep their layout


def copy(folder: Path) -> dict[str, str]:
    """Make it there; with these environment variables it is what Python imports."""
    (runtime,) = printed(f"import blockcell\n{LOADED}\nprint(*loaded())").split()
    shutil.copytree(Path(blockcell.__file__).parent, folder / "blockcell", ignore=shutil.ignore_patterns("__pycache__"))
    for module in (folder / "blockcell").glob("*.so"):
        module.write_bytes(module.read_bytes().replace(NAME, OWN))
    (folder / "libgomp.so.9").write_bytes(Path(runtime).read_bytes().replace(NAME, OWN))
    return {"PYTHONPATH": str(folder), "LD_LIBRARY_PATH": str(folder)}
