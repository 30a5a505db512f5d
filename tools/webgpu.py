"""Run the tests of WebGPU with both packages that have the provider, on every GPU that is found here.

    python tools/webgpu.py

Two drivers that compute on the CPU count as GPUs: SwiftShader, of Chromium or Chrome, and llvmpipe, of Mesa.  The
packages go to build/webgpu and leave the environment as it is; from there onnxruntime-webgpu hides the onnxruntime that
is installed.  Fails if a test does, if pytest ends in any other way, or if nothing was compared.

Run by CI on every push, and by hand.  Takes minutes for each GPU and package.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Mapping
from glob import glob
from importlib import metadata
from pathlib import Path

from children import ROOT, last_line, run

BUILD = ROOT / "build" / "webgpu" / str(sys.implementation.cache_tag)
PACKAGES = ["onnxruntime-ep-webgpu", "onnxruntime-webgpu"]  # the plugin, and the one with the provider built in
DRIVERS = {
    "SwiftShader": [
        "/usr/lib/chromium/vk_swiftshader_icd.json",
        "/usr/lib/chromium-browser/vk_swiftshader_icd.json",
        "/opt/google/chrome/vk_swiftshader_icd.json",
    ],
    "llvmpipe": ["/usr/share/vulkan/icd.d/lvp_icd*.json", "/usr/local/share/vulkan/icd.d/lvp_icd*.json"],
}
SOFTWARE = {"ORT_WEBGPU_EP_ALLOW_SOFTWARE_ADAPTER": "1"}  # without it the plugin takes no such driver
TRIAL = """
import sys
import numpy as np
from onnx import parser
from onnx_export.runtime import ANY, RuntimeModel, why_not
if why_not("webgpu"):
    sys.exit(why_not("webgpu"))
RuntimeModel(parser.parse_model(ANY), "webgpu").run({"a": np.ones(1, np.float32)})
"""
NO_GPU = """No GPU was found that runs WebGPU. One that computes on the CPU is enough:
Debian: apt-get install chromium-common libvulkan1; Ubuntu: apt-get install mesa-vulkan-drivers libvulkan1"""

Environment = Mapping[str, str]


def install(package: str) -> Path:
    """Install a package into BUILD unless it is there, and return its folder."""
    folder = BUILD / package
    if not list(metadata.distributions(name=package, path=[str(folder)])):
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), package]
        if subprocess.run(command).returncode:
            sys.exit(f"{package} could not be installed")
    return folder


def with_package(package: str, environment: Environment) -> dict[str, str]:
    """Return an environment in which Python imports a package from BUILD, and blockcell from the checkout."""
    path = [str(BUILD / package), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**environment, "PYTHONPATH": os.pathsep.join(path)}


def candidate_gpus() -> Iterator[tuple[str, Environment]]:
    """Yield the GPUs that there may be: a name, and the environment that chooses it."""
    yield "the system's GPU", os.environ
    for name, places in DRIVERS.items():
        for driver in (path for place in places for path in sorted(glob(place))):
            yield name, os.environ | SOFTWARE | {"VK_ICD_FILENAMES": driver}


def gpus() -> dict[str, Environment]:
    """Return the environments of the GPUs that run a model with one of the packages at least, by name."""
    environments: dict[str, Environment] = {}
    for name, environment in candidate_gpus():
        if name in environments:
            continue
        for package in PACKAGES[:1] if name == "the system's GPU" else PACKAGES:  # the plugin knows software from a GPU
            trial = run(sys.executable, "-c", TRIAL, environment=with_package(package, environment))
            if trial.returncode == 0:
                environments[name] = environment
                break
            driver = environment.get("VK_ICD_FILENAMES", name)
            print(f"{package} is not tried on {driver}: {last_line(trial.stdout)}", flush=True)
    return environments


def run_tests(package: str, name: str, environment: Environment) -> bool:
    """Run the tests and print a line about them, and what pytest said unless they pass; return whether they do."""
    (distribution,) = metadata.distributions(name=package, path=[str(BUILD / package)])
    report, start = BUILD / "report.xml", time.perf_counter()
    report.unlink(missing_ok=True)
    options = ["-v", "-W", "error", "-p", "no:cacheprovider", "-m", "webgpu", f"--junitxml={report}"]
    command = sys.executable, "-m", "pytest", *options, "tests/onnx/test_onnx_webgpu.py"
    result = run(*command, environment=with_package(package, environment))
    seconds = time.perf_counter() - start
    properties, counts = {}, {"tests": 0, "skipped": 0}
    if report.exists():
        (suite,) = ElementTree.parse(report).getroot().iter("testsuite")
        properties = {element.get("name"): element.get("value") for element in suite.iter("property")}
        counts = {key: int(suite.get(key, 0)) for key in counts}
    compared = int(properties.get("compared") or 0)
    verdict = "passed" if compared else "FAILED: nothing was compared"
    if result.returncode:
        status = result.returncode
        verdict = f"FAILED: {signal.Signals(-status).name if status < 0 else f'exit status {status}'}"
    if verdict != "passed":
        print(*result.stdout.splitlines()[-200:], sep="\n")
    tests = f"{counts['tests'] - counts['skipped']} tests, {compared} outputs, {seconds:.0f} s"
    worst_text = f"; worst: {properties['worst']}" if properties.get("worst") else ""
    print(f"{package} {distribution.version} on {name}: {verdict}; {tests}{worst_text}", flush=True)
    return verdict == "passed"


def main() -> None:
    """Install both packages, find GPUs, and run the tests with each package on each GPU."""
    for package in PACKAGES:
        install(package)
    working_gpus = gpus()
    if not working_gpus:
        sys.exit(NO_GPU)
    results = [
        run_tests(package, name, environment) for name, environment in working_gpus.items() for package in PACKAGES
    ]
    sys.exit(not all(results))


if __name__ == "__main__":
    main()
