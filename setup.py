"""Builds the compiled modules; everything else about the package is in pyproject.toml.

The kernels, `pyx/_engine.pyx`, are translated once and compiled for each CPU level and each type in which they
compute, as `blockcell._engine_<type>_<level>`; a level is picked at import. All other modules are compiled once.
BLOCKCELL_LEVELS limits the levels that are built: `runnable`, those that this CPU runs; `best`, the highest of these
alone; or by their names, say `base,v3`. Without it, or with `all`, all are built.
"""

import gzip
import hashlib
import itertools
import os
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import Cython
import numpy
from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.sdist import sdist
from setuptools.modified import newer_group

# Compiled for each CPU level and each type; every other pyx/_*.pyx once, for the oldest CPU.
KERNELS = ("_engine", "_for_tests")
TYPES = ("float", "double")  # REAL in pyx/product/real.h
FOR_TESTS = "blockcell._for_tests_"  # for tests in a checkout; not part of wheels
SHARED = "blockcell._cyutility"  # Cython's code for memoryviews, once instead of in every module
LEVELS = {  # and their flags; without the last one clang uses half of a v4 register and takes twice as long
    "base": ["-march=x86-64"],
    "v3": ["-march=x86-64-v3"],
    "v4": ["-march=x86-64-v4", "-mprefer-vector-width=512"],
}
CROSS = "_PYTHON_HOST_PLATFORM" in os.environ  # by which CPython, too, knows that it builds for another machine
HAS_LEVELS = sysconfig.get_platform() == "linux-x86_64"

# Traps and errno keep compilers from vectorising; results do not depend on them. -ffast-math would change results.
FLAGS = ["-O3", "-fno-math-errno", "-fno-trapping-math", "-g0"]
NO_CALLS = ["-fno-tree-loop-distribute-patterns"]  # gcc: no memset or memcpy for a line or two
# gcc for x86: no `rep stos` or `rep movs` for a struct. They start slowly, and a call of an op clears a memoryview for
# each array.
NO_REP = [f"-m{function}-strategy=vector_loop:1024:noalign,libcall:-1:noalign" for function in ("memset", "memcpy")]
# gcc, where vectors have masks: a loop over a line, 16 floats, becomes vectors before it is unrolled, and a part of a
# line is loaded at once.
VECTORS_FIRST = ["--param=max-completely-peel-times=15"]
# A loop that begins inside a cache line is slower while the core's other hyperthread is busy. Without the parameter gcc
# leaves out loops that it takes to be rare, among them half of the tile's.
ALIGNED_LOOPS = ["-falign-loops=64", "--param=align-threshold=65536"]
MAC = sys.platform == "darwin"
BREW = os.environ.get("HOMEBREW_PREFIX", "/opt/homebrew")  # Apple's clang comes without OpenMP, Homebrew has a library
MAC_OPENMP = ["-Xpreprocessor", "-fopenmp", f"-I{BREW}/opt/libomp/include"], [f"-L{BREW}/opt/libomp/lib", "-lomp"]
OPENMP = MAC_OPENMP if MAC else (["-fopenmp"], ["-fopenmp"])  # to compile, to link
NO_SYMBOLS = ["-Wl,-x"] if MAC else ["-Wl,-s"]  # of functions inside: for profilers in a checkout, not in wheels
PROBE = "int main(void) { return 0; }"
PYTHON_PROBE = f"#include <Python.h>\n{PROBE}"
WHAT_TO_INSTALL = (
    "blockcell needs gcc (or clang, as CC=clang) and the headers of Python: `apt install gcc python3-dev python3-venv`"
    " on Debian and Ubuntu, `dnf install gcc python3-devel` on Fedora, `xcode-select --install` on macOS"
)
LEVEL_PROBE = '#include "{header}"\nint main(void) {{ return !runs_{level}(); }}'
OPENMP_PROBE = """
#include <omp.h>
int main(void) {
    int threads = 0;
    #pragma omp parallel num_threads(2) reduction(+ : threads)
    threads += 1;
    return threads < 1 || omp_get_max_threads() < 1;
}
"""
DIRECTIVES = {
    "language_level": 3,
    "boundscheck": False,
    "wraparound": False,
    "initializedcheck": False,
    "cdivision": True,
    "embedsignature": True,
    "emit_code_comments": False,  # which would double what C compilers read
    "freethreading_compatible": True,
}


WANTED_LEVELS = os.environ.get("BLOCKCELL_LEVELS") or "all"


def levels():
    """Return the CPU levels that may be built; of `runnable` and `best` only a compiler can tell which they are."""
    known = list(LEVELS) if HAS_LEVELS else ["base"]
    if WANTED_LEVELS in ("all", "runnable", "best"):
        return known
    chosen = [level.strip() for level in WANTED_LEVELS.split(",")]
    if not set(chosen) <= set(known):
        names = ", ".join(known)
        raise SystemExit(f"BLOCKCELL_LEVELS={WANTED_LEVELS}: expected all, runnable, best, or levels out of {names}")
    return chosen


def headers():
    """Return the files that any compiled module may include."""
    return sorted(path for path in Path("pyx").rglob("*") if path.suffix in (".pxd", ".h"))


def source_hash(source):
    """What a kernel is built from: the package refuses one that was built from something else."""
    return hashlib.sha256(b"".join(file.read_bytes() for file in [source, *headers()])).hexdigest()[:16]


def translation_key(source):
    """Return what the C file of a source depends on: the sources, the options in this file, Cython and numpy."""
    options_hash = hashlib.sha256(Path("setup.py").read_bytes()).hexdigest()[:16]
    return f"{source_hash(source)} {options_hash} Cython {Cython.__version__} numpy {numpy.__version__}"


def extensions():
    sources = sorted(Path("pyx").glob("_*.pyx"))
    hashes = {source.stem: source_hash(source) for source in sources if source.stem in KERNELS}
    for source in sources:
        is_kernel = source.stem in KERNELS
        for level, number_type in itertools.product(levels(), TYPES) if is_kernel else [("base", None)]:
            name = f"{source.stem}_{number_type}_{level}" if is_kernel else source.stem
            extension = Extension(f"blockcell.{name}", [source.as_posix()], depends=["setup.py", *map(str, headers())])
            if is_kernel:
                extension.define_macros = [
                    ("REAL", number_type),
                    ("BLOCKCELL_SOURCE", f'"{hashes[source.stem]}"'),
                ]
            elif source.stem == "_cpu":
                extension.depends += [f"pyx/{stem}.pyx" for stem in hashes]
                known = " ".join(f"{stem}={found}" for stem, found in hashes.items())
                extension.define_macros = [("BLOCKCELL_SOURCES", f'"{known}"')]
            extension.level, extension.stem = level, source.stem
            yield extension
    extension = Extension(SHARED, ["_cyutility.c"])  # which cythonize writes, into its build_dir
    extension.level, extension.stem = "base", "_cyutility"
    yield extension


def named(extension, c):
    """The C file that compiles c, which is a module without a level, as this one."""
    name = extension.name.removeprefix("blockcell.")
    if name == extension.stem:
        return c
    file = Path(f"build/cython/{name}.c")
    text = f'#define PyInit_{extension.stem} PyInit_{name}\n#include "{Path(c).resolve().as_posix()}"\n'
    write_if_new(file, text)
    extension.depends.append(c)
    return file.as_posix()


def write_if_new(file, text):
    """Write the text to the file, unless it has it already, so that what depends on it stays newer."""
    file.parent.mkdir(parents=True, exist_ok=True)
    if not file.exists() or file.read_text() != text:
        file.write_text(text)


def compile_outdated(compiler, sources, output_dir=None, depends=None, **options):
    """Compile the sources unless their objects are newer than all that they depend on; return the objects."""
    objects = compiler.object_filenames(sources, output_dir=output_dir)
    if any(newer_group([*sources, *(depends or [])], file, missing="newer") for file in objects):
        type(compiler).compile(compiler, sources, output_dir, depends=depends, **options)
    return objects


class BuildExt(build_ext):
    def finalize_options(self):
        super().finalize_options()
        self.parallel = self.parallel or os.cpu_count()
        # An editable install would compile in a new temporary folder, so everything, every time. The objects of one
        # Python, by its ABI, are those of editable and other installs.
        self.build_temp = f"build/temp/{sysconfig.get_config_var('SOABI')}"
        self.link_flags = [] if self.inplace else NO_SYMBOLS
        if self.inplace:
            self.build_lib = "build/inplace"
        else:
            self.extensions = [extension for extension in self.extensions if not extension.name.startswith(FOR_TESTS)]

    def build_extensions(self):
        if self.compiler.compiler_type == "msvc":
            raise SystemExit("blockcell cannot be built with MSVC, only with gcc or clang: see docs/platforms.md")
        if error := self.failure(PYTHON_PROBE, [], []):  # before Cython takes its minutes
            raise SystemExit(f"{WHAT_TO_INSTALL}; a program that includes Python.h does not compile here: {error}")
        self.compiler.compile = partial(compile_outdated, self.compiler)
        compile_flags, link_flags = OPENMP
        error = self.failure(OPENMP_PROBE, compile_flags, link_flags)
        if error:
            self.warn(f"OpenMP does not work here ({error}): the kernels will run on one thread")
            compile_flags, link_flags = [], []
        gcc_flags = NO_CALLS, NO_REP, ALIGNED_LOOPS, VECTORS_FIRST  # clang warns of some
        no_calls, no_rep, aligned_loops, vectors_first = (
            [] if self.failure(PROBE, ["-Werror", *flags], []) else flags for flags in gcc_flags
        )
        compile_flags = no_calls + compile_flags
        self.extensions = self.chosen_extensions()
        c_files = self.translated({extension.stem: extension.sources for extension in self.extensions})
        # The longest first, so that no core waits for the last one.
        self.extensions.sort(key=lambda extension: Path(c_files[extension.stem]).stat().st_size, reverse=True)
        command = Path(self.build_temp, "command")  # whoever compiles with another one compiles everything
        write_if_new(command, " ".join([*self.compiler.compiler_so, *self.compiler.linker_so, *compile_flags]))
        for extension in self.extensions:
            extension.depends.append(command.as_posix())
            extension.sources = [named(extension, c_files[extension.stem])]
            level_flags = LEVELS[extension.level] if HAS_LEVELS else []
            if extension.level != "base":
                level_flags = vectors_first + level_flags
            extension.extra_compile_args = FLAGS + compile_flags + level_flags
            extension.include_dirs = ["pyx"]
            # The OpenMP runtime is loaded with the kernels and not before: blockcell/_kernels.py.
            extension.extra_link_args = self.link_flags + (link_flags if extension.stem in KERNELS else [])
            extension.extra_compile_args += aligned_loops if extension.stem in KERNELS else no_rep
            if extension.stem in ("_integer", "_training"):
                extension.extra_compile_args += ["-ffp-contract=off"]  # their sums and products are numpy's
            if extension.stem in ("_args", "_layers", "_stream", "_training"):
                extension.include_dirs += [numpy.get_include()]
                extension.define_macros += [("NPY_NO_DEPRECATED_API", "NPY_1_7_API_VERSION")]
            if extension.stem == "_cpu":
                extension.define_macros += [("BLOCKCELL_FLAGS", f'"{" ".join(FLAGS + compile_flags)}"')]
        super().build_extensions()

    def chosen_extensions(self):
        """Return the extensions without the levels that BLOCKCELL_LEVELS leaves out on this CPU."""
        if not HAS_LEVELS or WANTED_LEVELS not in ("runnable", "best"):
            return self.extensions
        runnable = self.runnable_levels()
        chosen = runnable[-1:] if WANTED_LEVELS == "best" else runnable
        return [ext for ext in self.extensions if ext.level in chosen or ext.stem not in KERNELS]

    def runnable_levels(self):
        """Return the CPU levels that this CPU runs, from the oldest; all of them where the build is for another CPU."""
        header = Path("pyx/levels.h").resolve().as_posix()
        probes = {level: LEVEL_PROBE.format(header=header, level=level) for level in LEVELS if level != "base"}
        return ["base", *(level for level, probe in probes.items() if not self.failure(probe, [], []))]

    def translated(self, sources):
        """Translate the sources, and return the C file of each.

        A source whose key is the one beside its C file is not translated again. cythonize goes by times instead, and
        .pxd files of Cython and numpy are new whenever pip installs these into a new environment for a build.
        """
        c_files = {stem: Path("build/cython", files[0]).with_suffix(".c") for stem, files in sources.items()}
        keys = {stem: translation_key(Path(files[0])) for stem, files in sources.items() if stem != "_cyutility"}
        key_files = {stem: c_files[stem].with_suffix(".key") for stem in keys}
        unchanged = {
            stem
            for stem, file in key_files.items()
            if c_files[stem].exists() and file.exists() and file.read_text() == keys[stem]
        }
        with ProcessPoolExecutor(self.parallel) as pool:
            jobs = [
                pool.submit(
                    cythonize,
                    [Extension(f"blockcell.{stem}", files)],
                    include_path=["pyx"],
                    build_dir="build/cython",
                    compiler_directives=DIRECTIVES,
                    shared_utility_qualified_name=SHARED,
                    force=True,  # else a C file that was copied, and so is newer than its source, would stay
                )
                for stem, files in sources.items()
                if stem not in unchanged
            ]
            for job in jobs:
                job.result()
        for stem, file in key_files.items():
            file.write_text(keys[stem])
        return {stem: file.as_posix() for stem, file in c_files.items()}

    def failure(self, program, compile_flags, link_flags):
        """Why the program does not compile, link or run, or None; the header may be there without the library."""
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "probe.c").write_text(program)
            try:
                objects = self.compiler.compile([f"{folder}/probe.c"], folder, extra_postargs=compile_flags)
                self.compiler.link_executable(objects, f"{folder}/probe", extra_postargs=link_flags)
                if not CROSS:
                    subprocess.run([f"{folder}/probe"], check=True)
            except Exception as error:  # each compiler class has its own
                return error
            return None


class SourceDistribution(sdist):
    """Whose bytes follow from the files alone, if SOURCE_DATE_EPOCH is set; wheels are so without our help."""

    def make_archive(self, base_name, format, root_dir=None, base_dir=None, owner=None, group=None):
        epoch = os.environ.get("SOURCE_DATE_EPOCH")
        if epoch is None or format != "gztar":
            return super().make_archive(base_name, format, root_dir, base_dir, owner, group)

        def plain(member):
            member.mtime, member.uid, member.gid, member.uname, member.gname = int(epoch), 0, 0, "", ""
            member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            return member

        name = f"{base_name}.tar.gz"
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        with (
            open(name, "wb") as file,
            gzip.GzipFile("", "wb", fileobj=file, mtime=int(epoch)) as zipped,
            tarfile.open(mode="w", fileobj=zipped) as archive,
        ):
            for path in [Path(base_dir), *sorted(Path(base_dir).rglob("*"))]:
                archive.add(path, recursive=False, filter=plain)
        return name


if __name__ == "__main__":  # cythonize's workers may import this file
    setup(ext_modules=list(extensions()), cmdclass={"build_ext": BuildExt, "sdist": SourceDistribution})
