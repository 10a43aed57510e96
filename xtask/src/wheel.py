"""Packs the connector for vLLM, the NIXL backend KVX and the program `kvx` into a Python wheel. `cargo xtask wheel` runs it after the builds.

python3 wheel.py REPOSITORY TARGET [--check]
--check installs and uses the wheel in a new environment together with NIXL.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from elftools.elf.elffile import ELFFile

ROOT, TARGET = Path(sys.argv[1]), Path(sys.argv[2])
# The oldest glibc that the wheel runs on, and the oldest Python.
PLATFORM = "manylinux_2_34_x86_64"
TAG = f"cp311-abi3-{PLATFORM}"
NAME = "kvx"
PLUGIN = "libplugin_KVX.so"
# The plug-in is installed into users' environments, so it must be small.
MOST_BYTES = 4_200_000
# The module, as cargo names it and as Python loads it.
MODULE, LOADED = "libkvx_python.so", "_kvx.abi3.so"
# The whole wheel.
MOST_BYTES_OF_WHEEL = 15 << 20
# The libraries that the plug-in may need: those of glibc, and libgcc_s.
MAY_NEED = "ld-linux-x86-64.so.2 libc.so.6 libm.so.6 libdl.so.2 libpthread.so.0 libgcc_s.so.1".split()
LICENCES = re.compile("LICEN[SC]E|COPYING|COPYRIGHT|NOTICE|UNLICENSE", re.IGNORECASE)
METADATA = """\
Metadata-Version: 2.4
Name: kvx
Version: {version}
Summary: Moves KV cache between LLM inference servers: a connector for vLLM, and a backend of NIXL
License-Expression: Apache-2.0 OR MIT
License-File: LICENSE-APACHE
License-File: LICENSE-MIT
License-File: THIRD-PARTY.txt
Requires-Python: >=3.11
Description-Content-Type: text/markdown

{readme}"""


def run(*command, **options):
    """Runs a command, prints its output and returns it; ends this program if the command fails."""
    print(*command, flush=True)
    finished = subprocess.run(command, stdout=subprocess.PIPE, text=True, **options)
    print(finished.stdout, end="", flush=True)
    if finished.returncode != 0:
        sys.exit(f"{command[0]} failed with status {finished.returncode}")
    return finished.stdout


def cargo(*arguments):
    """Runs cargo and returns its output without printing it."""
    program = os.environ.get("CARGO", "cargo")
    return subprocess.run([program, *arguments], stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT).stdout


def committed():
    """Returns the time of the last commit in seconds, or the first one that an archive can have."""
    git = ["git", "-C", str(ROOT), "log", "-1", "--format=%ct"]
    finished = subprocess.run(git, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    return finished.stdout.strip() or "315532800"


def check_library(library, most=None):
    """Ends this program if a library is too large, or needs a library that a machine might lack."""
    size = library.stat().st_size
    with open(library, "rb") as file:
        tags = ELFFile(file).get_section_by_name(".dynamic").iter_tags()
        needed = [tag.needed for tag in tags if tag.entry.d_tag == "DT_NEEDED"]
    print(f"{library.name}: {size} bytes, needs {' '.join(needed)}")
    if most and size > most:
        sys.exit(f"{library.name} must not have more than {most} bytes")
    if not needed or not set(needed) <= set(MAY_NEED):
        sys.exit(f"{library.name} may need libraries of glibc and libgcc_s only")


def third_parties(packages):
    """Returns the crates in the libraries and the program with their licences, and each licence's text once."""
    tree = cargo("tree", "-p", "kvx-nixl", "-p", "kvx-cli", "-p", "kvx-python", "-e", "normal", "--prefix", "none")
    built_in = {tuple(line.split()[:2]) for line in tree.splitlines() if line.strip()}
    texts, page = {}, "Built with these crates:\n\n"
    for package in packages:
        if package["source"] is None or (package["name"], "v" + package["version"]) not in built_in:
            continue
        name = f"{package['name']} {package['version']}"
        page += f"{name}: {package['license'] or 'see below'}\n"
        for file in sorted(Path(package["manifest_path"]).parent.iterdir()):
            if file.is_file() and LICENCES.match(file.name):
                text = file.read_text(errors="replace").replace("\r\n", "\n").strip()
                texts.setdefault(text, []).append(name)
    for text, names in sorted(texts.items()):
        page += f"\n{'-' * 80}\n{', '.join(names)}\n\n{text}\n"
    return page


def make(folder):
    """Makes the wheel in a folder and returns its path."""
    packages = json.loads(cargo("metadata", "--format-version", "1", "--all-features"))["packages"]
    version = next(package["version"] for package in packages if package["name"] == "kvx-transfer")
    tree = folder / "tree"
    shutil.rmtree(tree, ignore_errors=True)
    programs, record = tree / NAME / "bin", tree / f"{NAME}-{version}.dist-info"
    licences = record / "licenses"
    programs.mkdir(parents=True)
    licences.mkdir(parents=True)
    for file in (ROOT / "kvx-python/python" / NAME).glob("*.py"):
        shutil.copy(file, tree / NAME)
    for file in ["kvx", PLUGIN]:
        shutil.copy(TARGET / "release" / file, programs)
    # `kvx mooncake-adapter` uses these on machines without a compiler.
    for file in (folder / "adapter").iterdir():
        shutil.copy(file, programs)
    shutil.copy(TARGET / "release" / MODULE, tree / NAME / LOADED)
    check_library(programs / PLUGIN, MOST_BYTES)
    check_library(tree / NAME / LOADED)
    for licence in ["LICENSE-APACHE", "LICENSE-MIT"]:
        shutil.copy(ROOT / licence, licences)
    (licences / "THIRD-PARTY.txt").write_text(third_parties(packages))
    readme = (ROOT / "kvx-python/README.md").read_text()
    (record / "METADATA").write_text(METADATA.format(version=version, readme=readme))
    (record / "WHEEL").write_text(
        f"Wheel-Version: 1.0\nGenerator: kvx xtask\nRoot-Is-Purelib: false\nTag: {TAG}\n"
    )
    (record / "entry_points.txt").write_text("[console_scripts]\nkvx = kvx.__main__:main\n")
    # The archive has the times and modes of its files: the same for the same sources.
    for file in filter(Path.is_file, tree.rglob("*")):
        file.chmod(0o755 if file.parent == programs else 0o644)
    times = {**os.environ, "SOURCE_DATE_EPOCH": os.environ.get("SOURCE_DATE_EPOCH") or committed()}
    run(sys.executable, "-m", "wheel", "pack", str(tree), "--dest-dir", str(folder), env=times)
    wheel = folder / f"{NAME}-{version}-{TAG}.whl"
    if wheel.stat().st_size > MOST_BYTES_OF_WHEEL:
        sys.exit(f"{wheel.name} has {wheel.stat().st_size} bytes, and may have {MOST_BYTES_OF_WHEEL}")
    audit = run(sys.executable, "-m", "auditwheel", "show", str(wheel), stderr=subprocess.STDOUT)
    glibc = re.search(r'"manylinux_2_(\d+)_', audit)
    if glibc is None or int(glibc[1]) > int(PLATFORM.split("_")[2]):
        sys.exit(f"auditwheel does not say that the wheel runs on {PLATFORM}")
    return wheel


def check(wheel):
    """Follows the instructions of docs/operations/vllm.md for the wheel, in a new environment with NIXL."""
    environment = TARGET / "peers/wheel/clean"
    shutil.rmtree(environment, ignore_errors=True)
    run("python3", "-m", "venv", "--without-pip", str(environment))
    packages = next(environment.glob("lib/*/site-packages"))
    # Copies NIXL's wheel, so that links into it stay in this environment.
    installed = [path.parent for path in TARGET.glob("peers/nixl/venv/lib/*/site-packages/nixl_cu12")]
    if not installed:
        sys.exit("NIXL's wheel is not installed: cargo xtask test --install")
    for entry in installed[0].iterdir():
        if entry.name.startswith(("nixl_cu12", ".nixl_cu12", "numpy")):
            run("cp", "-a", "--reflink=auto", str(entry), str(packages))
    plugin = packages / ".nixl_cu12.mesonpy.libs/plugins" / PLUGIN
    plugin.unlink(missing_ok=True)  # the copied environment may contain one
    python = str(environment / "bin/python")
    run("python3", "-m", "pip", "--python", python, "install", "--no-index", "--disable-pip-version-check", str(wheel))
    variables = {name: value for name, value in os.environ.items() if name not in ["NIXL_PLUGIN_DIR", "KVX_NIXL_PLUGIN"]}
    for command, exists in [("install", True), ("check", True), ("remove", False)]:
        output = run(python, "-m", NAME, "nixl", command, stderr=subprocess.STDOUT, env=variables)
        if plugin.exists() != exists:
            sys.exit(f"after {command}, {PLUGIN} exists: {plugin.exists()}")
        if command == "check" and "KVX: 1024 blocks of 4 KiB " not in output:
            sys.exit("the check has moved no blocks")
    engines = list(TARGET.glob("peers/mooncake/venv/lib/*/site-packages/mooncake/engine.so"))
    if not engines:
        sys.exit("Mooncake's wheel is not installed: cargo xtask test --install")
    kvx = str(environment / "bin/kvx")
    run(kvx, "--version")
    run(kvx, "backends")
    run(kvx, "proxy", "--help")
    run(python, "-c", "from kvx import _kvx; print(_kvx.__version__, _kvx.Scheduler, _kvx.Worker)")
    run(kvx, "mooncake-adapter", "--engine", str(engines[0]))


wheel = make(TARGET / "xtask/wheel")
if "--check" in sys.argv:
    check(wheel)
print(wheel)
