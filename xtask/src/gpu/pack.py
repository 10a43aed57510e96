"""Makes the folder that `cargo xtask gpu --kit` carries to a machine without cargo and without a network.

pack.py --peers PEERS --revision TEXT [--rehearsal] FOLDER NAME=FILE...
puts these files under their names into an archive in the folder, with the needed files of the wheels in PEERS, and a
script beside the archive that unpacks it and runs everything.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--peers", type=Path, required=True)
parser.add_argument("--revision", required=True)
parser.add_argument("--rehearsal", action="store_true")
parser.add_argument("folder", type=Path)
parser.add_argument("files", nargs="+")
ARGUMENTS = parser.parse_args()
PEERS = ARGUMENTS.peers.resolve()

SCRIPT = """\
#!/bin/sh
# Tests kvx on this machine's NVIDIA GPU and writes the results into a folder; --help lists the options.
# KVX_CUDA_LIB names the driver if it is not libcuda.so.1.
set -e
here=$(cd "$(dirname "$0")" && pwd)
# Another archive in the same folder is unpacked anew.
if ! [ -e "$here/unpacked" ] || [ "$here/kvx-gpu.tar.gz" -nt "$here/unpacked/began" ]; then
    for program in tar gzip; do
        command -v $program >/dev/null || { echo "missing: $program, which unpacks $here/kvx-gpu.tar.gz" >&2; exit 1; }
    done
    rm -rf "$here/unfinished" "$here/unpacked"
    mkdir -p "$here/unfinished"
    tar -xzf "$here/kvx-gpu.tar.gz" -C "$here/unfinished"
    touch "$here/unfinished/began"
    mv "$here/unfinished" "$here/unpacked"
fi
exec "$here/unpacked/xtask" gpu --from "$here/unpacked" "$@"
"""
ARCHIVE = "kvx-gpu.tar.gz"
MOST_MIB = 45
# The newest glibc minor version whose symbols a program may need: that of Debian 12.
GLIBC = 36
# The Pythons that NIXL's module is packed for, besides the one that runs this.
PYTHONS = ["3.12", "3.13"]
# The packed files of the peers' wheels; their dependencies in the same wheel are added. Of NIXL's
# plug-ins only UCX's is packed, and none of UCX's modules for network cards: a quarter of the
# wheel.
WHEELS = {
    "ucx": [
        "libucx/lib/libucp.so.0",
        "libucx/lib/ucx/libuct_cma.so.0",
        "libucx/lib/ucx/libuct_cuda.so.0",
        "libucx/lib/ucx/libucm_cuda.so.0",
    ],
    "nixl": [
        ".nixl_cu12.mesonpy.libs/libnixl_capi.so",
        ".nixl_cu12.mesonpy.libs/plugins/libplugin_UCX.so",
        "nixl_cu12.libs/ucx/libuct_cma.so.0.0.0",
        "nixl_cu12.libs/ucx/libuct_cuda.so.0.0.0",
        "nixl_cu12.libs/ucx/libucm_cuda.so.0.0.0",
        "nixl_cu12/__init__.py",
        "nixl_cu12/_api.py",
        "nixl_cu12/logging.py",
        "nixl_cu12/_bindings.cpython-*.so",
    ],
}


def needed_by(file, packages):
    """Returns the dependencies of a library that lie among these packages."""
    if ".so" not in file.name:
        return set()
    output = subprocess.run(["ldd", file], stdout=subprocess.PIPE, text=True, check=True).stdout
    # The linker keeps relative parts such as `..` in its paths.
    needed = {Path(path).resolve() for path in re.findall(r" => (/\S+)", output)}
    return {path for path in needed if path.is_relative_to(packages.resolve())}


def pack_wheel(peer, patterns, packed):
    """Copies these files of a wheel, and their dependencies, to the same place of the environment. Returns that place."""
    found = list((PEERS / peer).glob(f"venv/lib/*/site-packages/{patterns[0]}"))
    if not found:
        print(f"without {peer}: cargo xtask test --install installs it")
        return None
    packages = Path(str(found[0]).removesuffix(patterns[0]))
    files = {file for pattern in patterns for file in packages.glob(pattern)}
    for file in list(files):
        files |= needed_by(file, packages)
    for file in files:
        copy = packed / "peers" / (file.parent.resolve() / file.name).relative_to(PEERS)
        copy.parent.mkdir(parents=True, exist_ok=True)
        # Not stripped: stripping damages libraries that tools for wheels have changed.
        shutil.copy(file, copy)
    return packages


def pack_bindings(python, packages, packed):
    """Adds NIXL's module for another Python from its wheel of the same release, whose libraries are the same."""
    release = next(packages.glob("nixl_cu12-*.dist-info")).name.split("-")[1].removesuffix(".dist")
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
             "--only-binary=:all:", "--implementation=cp", f"--python-version={python}",
             "--platform=manylinux_2_28_x86_64", f"--dest={folder}", f"nixl-cu12=={release}"],
            check=True,
        )
        with zipfile.ZipFile(next(Path(folder).glob("*.whl"))) as wheel:
            modules = [name for name in wheel.namelist() if name.startswith("nixl_cu12/_bindings.cpython-")]
            wheel.extractall(packed / "peers" / packages.relative_to(PEERS), modules)


def main():
    folder = ARGUMENTS.folder
    folder.mkdir(parents=True, exist_ok=True)
    for old in ("unpacked", "unfinished"):  # of an earlier kit in this folder
        shutil.rmtree(folder / old, ignore_errors=True)
    with tempfile.TemporaryDirectory() as temporary:
        packed = Path(temporary)
        packed.chmod(0o755)  # some tests start programs as another user
        for name, file in (entry.split("=", 1) for entry in ARGUMENTS.files):
            (packed / name).parent.mkdir(exist_ok=True)
            copy = shutil.copy(file, packed / name)
            if copy.suffix == ".py":
                continue
            newest = max([int(minor) for minor in re.findall(rb"GLIBC_2\.(\d+)", copy.read_bytes())], default=0)
            if newest > GLIBC:
                sys.exit(f"{name} needs glibc 2.{newest}, not 2.{GLIBC}: build on Debian 12")
            subprocess.run(["strip", copy], check=True)
        for peer, patterns in WHEELS.items():
            packages = pack_wheel(peer, patterns, packed)
            if peer == "nixl" and packages and not ARGUMENTS.rehearsal:
                for python in PYTHONS:
                    pack_bindings(python, packages, packed)
        (packed / "revision").write_text(ARGUMENTS.revision + "\n")
        with tarfile.open(folder / ARCHIVE, "w:gz", compresslevel=1 if ARGUMENTS.rehearsal else 9) as archive:
            archive.add(packed, ".")
        unpacked = sum(file.stat().st_size for file in packed.rglob("*") if file.is_file()) / (1 << 20)
    script = folder / "run"
    script.write_text(SCRIPT)
    script.chmod(0o755)
    size = sum(file.stat().st_size for file in (script, folder / ARCHIVE)) / (1 << 20)
    print(f"{folder}: {size:.1f} MiB, {unpacked:.1f} MiB unpacked")
    if size > MOST_MIB and not ARGUMENTS.rehearsal:
        sys.exit(f"the kit may have {MOST_MIB} MiB; pack fewer files")


main()
