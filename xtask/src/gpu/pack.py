"""Packs the archive that `cargo xtask gpu --pack` carries to a machine without cargo and without a network.

python3 pack.py PEERS FOLDER NAME=FILE...
packs these files under their names, a script that runs everything, and the needed files of the wheels in PEERS.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

PEERS, FOLDER, FILES = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
# Uses only shell built-ins, because the machine may have no other programs.
SCRIPT = """\
#!/bin/sh
# Tests kvx on this machine's NVIDIA GPU and prints a table of figures.
# KVX_CUDA_LIB names the driver if it is not libcuda.so.1.
exec "${0%/*}/xtask" gpu --from "${0%/*}" "$@"
"""
MOST_MIB = 60
# The newest glibc minor version whose symbols a program may need: that of Debian 12.
GLIBC = 36
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
    ],
}


def pack_wheel(peer, roots, packed):
    """Copies these files of a wheel, and their dependencies, to the same place of the environment."""
    found = list((PEERS / peer).glob(f"venv/lib/*/site-packages/{roots[0]}"))
    if not found:
        print(f"without {peer}: cargo xtask test --install installs it")
        return
    packages = Path(str(found[0]).removesuffix(roots[0]))
    files = {packages / root for root in roots}
    for root in roots:
        output = subprocess.run(["ldd", packages / root], stdout=subprocess.PIPE, text=True, check=True).stdout
        # The linker keeps relative parts such as `..` in its paths.
        needed = {Path(path).resolve() for path in re.findall(r" => (/\S+)", output)}
        files |= {path for path in needed if path.is_relative_to(packages.resolve())}
    for file in files:
        copy = packed / "peers" / (file.parent.resolve() / file.name).relative_to(PEERS.resolve())
        copy.parent.mkdir(parents=True, exist_ok=True)
        # Not stripped: stripping damages libraries that tools for wheels have changed.
        shutil.copy(file, copy)


packed, archive = FOLDER / "kvx-gpu", FOLDER / "kvx-gpu.tar.gz"
shutil.rmtree(packed, ignore_errors=True)
packed.mkdir(parents=True)
for name, file in (entry.split("=", 1) for entry in FILES):
    copy = shutil.copy(file, packed / name)
    newest = max([int(minor) for minor in re.findall(rb"GLIBC_2\.(\d+)", copy.read_bytes())], default=0)
    if newest > GLIBC:
        sys.exit(f"{name} needs glibc 2.{newest}, not 2.{GLIBC}: build on Debian 12")
    subprocess.run(["strip", copy], check=True)
for peer, roots in WHEELS.items():
    pack_wheel(peer, roots, packed)
script = packed / "run"
script.write_text(SCRIPT)
script.chmod(0o755)
subprocess.run(["tar", "-czf", archive, "-C", packed, "."], check=True)
size = archive.stat().st_size / (1 << 20)
print(f"{archive}: {size:.1f} MiB of at most {MOST_MIB} MiB")
if size > MOST_MIB:
    sys.exit("the archive is too large; pack fewer files")
