"""vLLM's MooncakeConnector on the CPU, for mixed.py: environments, counters, and a check that the shim is still needed."""

import os
import re
import subprocess
import sys

from servers import Fleet, check, clean_environment, row

SHIM = os.path.join(os.path.dirname(os.path.abspath(__file__)), "without_a_gpu")
LEASE = 30  # seconds that blocks wait for a decode; 480 by default
PATIENCE = LEASE + 60 + 10  # the time that a decoding vLLM waits for a lost prefill
REFUSES = "current_device_index"  # in the error of a vLLM without a GPU


def of_vllm(bootstrap, shim=True):
    """Returns the environment of a vLLM with this bootstrap port."""
    found = {"VLLM_MOONCAKE_BOOTSTRAP_PORT": str(bootstrap), "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT": str(LEASE),
             "VLLM_LOG_STATS_INTERVAL": "1"}
    return found | ({"PYTHONPATH": SHIM} if shim else {})


def of_kvx(bootstrap, built, folder):
    """Makes the adapter to vLLM's own Mooncake, and returns the environment of a kvx."""
    adapter = os.path.join(folder, "adapter")
    packages = next(path for path in sys.path if path.endswith("site-packages"))
    engine = os.path.join(packages, "mooncake/engine.so")
    made = subprocess.run([os.path.join(built, "kvx"), "mooncake-adapter", adapter, "--engine", engine], check=True, text=True,
                          stdout=subprocess.PIPE, env=clean_environment(), timeout=300).stdout
    found = dict(line.removeprefix("export ").split("=", 1) for line in made.splitlines())
    return found | {"VLLM_MOONCAKE_BOOTSTRAP_PORT": str(bootstrap), "VLLM_HOST_IP": "127.0.0.1",
                    "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT": str(LEASE)}


def written(prefill, block):
    """Returns the bytes that a vLLM has written. Only its log has them, with three decimals: they are whole blocks."""
    total = 0
    for line in prefill.said("KV Transfer metrics: "):
        count, each = (float(re.search(rf"{name}=([\d.]+)", line)[1]) for name in ("Num successful transfers", "Avg MB per transfer"))
        total += round(count * each * 2**20 / block) * block
    return total


def needs_a_card(case, bare):
    """Checks that a vLLM without the shim fails in the way that the shim prevents; otherwise it can be removed."""
    try:
        with Fleet(bare):
            ended = False
    except RuntimeError:
        ended = bool(bare.said(REFUSES))
    check(ended, f"a vLLM on the CPU does not fail with `{REFUSES}`: remove without_a_gpu")
    row(case["name"], case["backend"], case["block_size"], "a vLLM as it is, without a GPU", "does not start",
        (bare.said("RuntimeError: ") or [""])[0].rpartition("RuntimeError: ")[2][:90], "")
