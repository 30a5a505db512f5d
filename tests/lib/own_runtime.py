"""blockcell with an OpenMP runtime of its own, as a wheel has that auditwheel has repaired: that wheel, or a copy."""

import shutil
from pathlib import Path

from fresh import printed

import blockcell

PACKAGE = Path(blockcell.__file__).parent
REPAIRED = PACKAGE.with_name("blockcell.libs").is_dir()  # whether what is tested is such a wheel
LOADED = """
def loaded():
    with open("/proc/self/maps") as file:
        return sorted({line.split()[-1] for line in file if "/libgomp" in line})
"""
NAME, OWN = b"libgomp.so.1\0", b"libgomp.so.9\0"  # of the same length, so that files keep their layout


def copy(folder: Path) -> dict[str, str]:
    """Make it there, if need be; with these environment variables it is what Python imports."""
    if REPAIRED:
        return {"PYTHONPATH": str(PACKAGE.parent)}
    (runtime,) = printed(f"import blockcell\n{LOADED}\nprint(*loaded())").split()
    shutil.copytree(PACKAGE, folder / "blockcell", ignore=shutil.ignore_patterns("__pycache__"))
    for module in (folder / "blockcell").glob("*.so"):
        module.write_bytes(module.read_bytes().replace(NAME, OWN))
    (folder / "libgomp.so.9").write_bytes(Path(runtime).read_bytes().replace(NAME, OWN))
    return {"PYTHONPATH": str(folder), "LD_LIBRARY_PATH": str(folder)}
