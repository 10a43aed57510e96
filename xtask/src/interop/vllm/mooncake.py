"""vLLM's MooncakeConnector on the CPU, for mixed.py: what its processes are told, what they count, and what they refuse by themselves."""

import os
import re
import subprocess
import sys

from servers import Fleet, check, clean_environment, row

SHIM = os.path.join(os.path.dirname(os.path.abspath(__file__)), "without_a_gpu")
LEASE = 30  # seconds that blocks wait for a decode; 480 unless they are told
PATIENCE = LEASE + 60 + 10  # a vLLM that decodes waits so long for a prefill that is gone
REFUSES = "current_device_index"  # where a vLLM without a card ends


def of_vllm(bootstrap, shim=True):
    """Variables of a vLLM with this bootstrap port."""
    found = {"VLLM_MOONCAKE_BOOTSTRAP_PORT": str(bootstrap), "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT": str(LEASE),
             "VLLM_LOG_STATS_INTERVAL": "1"}
    return found | ({"PYTHONPATH": SHIM} if shim else {})


def of_kvx(bootstrap, built, folder):
    """Variables of a kvx: it makes the adapter to vLLM's own Mooncake."""
    adapter = os.path.join(folder, "adapter")
    packages = next(path for path in sys.path if path.endswith("site-packages"))
    engine = os.path.join(packages, "mooncake/engine.so")
    made = subprocess.run([os.path.join(built, "kvx"), "mooncake-adapter", adapter, "--engine", engine], check=True, text=True,
                          stdout=subprocess.PIPE, env=clean_environment(), timeout=300).stdout
    found = dict(line.removeprefix("export ").split("=", 1) for line in made.splitlines())
    return found | {"VLLM_MOONCAKE_BOOTSTRAP_PORT": str(bootstrap), "VLLM_HOST_IP": "127.0.0.1",
                    "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT": str(LEASE)}


def written(prefill, block):
    """Bytes that a vLLM has written. It counts them in its log alone, with three digits behind the point: they are whole blocks."""
    total = 0
    for line in prefill.said("KV Transfer metrics: "):
        count, each = (float(re.search(rf"{name}=([\d.]+)", line)[1]) for name in ("Num successful transfers", "Avg MB per transfer"))
        total += round(count * each * 2**20 / block) * block
    return total


def needs_a_card(case, bare):
    """That a vLLM without the shim ends where the shim helps: else it is not needed any more."""
    try:
        with Fleet(bare):
            ended = False
    except RuntimeError:
        ended = bool(bare.said(REFUSES))
    check(ended, f"a vLLM on the CPU does not end at `{REFUSES}`: without_a_gpu may go")
    row(case["name"], case["backend"], case["block_size"], "a vLLM as it is, without a GPU", "does not start",
        (bare.said("RuntimeError: ") or [""])[0].rpartition("RuntimeError: ")[2][:90], "")
