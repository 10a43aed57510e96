"""Puts the hook of `interop/mistralrs/hook` into a copy of mistral.rs's crate, which cargo downloads.

python3 mistralrs.py FOLDER VERSION DOWNLOAD
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

NAME = "mistralrs-core"
here, version, download = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])


def downloaded():
    """Has cargo download the crate, with the dependencies of the build that follows, and returns its folder."""
    (download / "src").mkdir(parents=True, exist_ok=True)
    (download / "src/lib.rs").write_text("")
    (download / "Cargo.toml").write_text(
        '[workspace]\n[package]\nname = "download"\nedition = "2024"\n[dependencies]\n'
        f'{NAME} = {{ version = "={version}", default-features = false }}\n'
    )
    shutil.copy(here / "Cargo.lock", download)
    command = [os.environ.get("CARGO", "cargo"), "metadata", "--format-version", "1"]
    metadata = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True, cwd=download).stdout)
    packages = [package for package in metadata["packages"] if (package["name"], package["version"]) == (NAME, version)]
    return Path(packages[0]["manifest_path"]).parent


def with_hook(name, contents, insertions):
    """Returns a file's contents with its insertions, each before the only line that begins with `before`."""
    for insertion in insertions:
        if insertion["file"] == name:
            lines = contents.decode().splitlines(keepends=True)
            places = [at for at, line in enumerate(lines) if line.startswith(insertion["before"])]
            if len(places) != 1:
                sys.exit(f"{name} has {len(places)} lines that begin with `{insertion['before']}`: the hook does not match this release")
            lines[places[0] : places[0]] = [line + "\n" for line in insertion["lines"]]
            contents = "".join(lines).encode()
    return contents


source = downloaded()
insertions = json.loads((here / "hook/insertions.json").read_text())
files = {str(file.relative_to(source)): file for file in source.rglob("*") if file.is_file()}
files["src/outside_kv.rs"] = here / "hook/outside_kv.rs"
for name, file in files.items():
    contents, copy = with_hook(name, file.read_bytes(), insertions), here / ".core" / name
    # Correct files stay untouched, so that cargo rebuilds only what has changed.
    if not copy.exists() or copy.read_bytes() != contents:
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(contents)
