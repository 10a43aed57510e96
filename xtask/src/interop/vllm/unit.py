"""Runs vLLM's own unit tests of requests with remote prefill and decode, with KvxConnector in place of NixlConnector.

`unit.py WORK SITE [VERSION]`: WORK contains vLLM's environment and the models, and SITE the Python
package `kvx`. VERSION is one of versions.py. The tests drive vLLM's scheduler and pretend to be its
workers. Each scheduler here has both halves of KvxConnector, with a worker whose memory no test
touches."""

import os
import subprocess
import sys

from versions import INSTALLED, fetch, sources

WORK, SITE = (os.path.abspath(path) for path in sys.argv[1:3])
VERSION = sys.argv[3] if len(sys.argv) > 3 else INSTALLED
FOLDER = os.path.join(WORK, "unit", VERSION)
UNIT = "tests/v1/kv_connector/unit"
TESTS = ["test_remote_decode_lifecycle.py", "test_remote_prefill_lifecycle.py", "test_output_aggregator.py"]
# Tests that say nothing about KvxConnector, each with the reason.
ALL_GROUPS = "its parameters name blocks of one KV cache group only, which KvxConnector refuses"
NOT_OURS = {
    "test_remote_prefill_lifecycle.py::test_p_side_chunked_prefill_mamba": "it replaces functions of NixlConnector's module",
    "test_remote_prefill_lifecycle.py::test_async_load_reserves_blocks_for_promotion_margin[multiple-groups]": ALL_GROUPS,
    "test_remote_prefill_lifecycle.py::test_async_load_reserves_blocks_for_promotion_margin[different-block-sizes]": ALL_GROUPS,
}
PLUGIN = '''
import os, random, socket
import vllm

assert vllm.__version__ == {version!r}, vllm.__version__
os.environ.update(VLLM_NIXL_SIDE_CHANNEL_HOST="127.0.0.1", VLLM_NIXL_SIDE_CHANNEL_PORT="0")
from kvx import _kvx
from kvx.vllm import KvxConnector, KvxHandshake
from tests.v1.kv_connector.unit import utils

MODEL = {model!r}
plain_config, plain_scheduler = utils.create_vllm_config, utils.create_scheduler
PORTS = range(12000, 32000)


def free_port():
    while True:
        with socket.socket() as held:
            try:
                held.bind(("127.0.0.1", port := random.choice(PORTS)))
                return port
            except OSError:
                pass



def create_vllm_config(*arguments, **options):
    options = dict(model=MODEL, max_model_len=2048, kv_connector="KvxConnector", kv_connector_module_path="kvx.vllm",
                   kv_role="kv_both") | options
    config = plain_config(*arguments, **options)
    config.kv_transfer_config.kv_connector_extra_config = {{"backends": ["SHM"], **config.kv_transfer_config.kv_connector_extra_config}}
    return config


def create_scheduler(vllm_config, num_blocks=10000, *arguments, **options):
    os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(free_port())
    scheduler = plain_scheduler(vllm_config, num_blocks, *arguments, **options)
    connector, block = scheduler.connector, vllm_config.cache_config.block_size
    from kvx.vllm import _socket

    pool = _kvx.Pool(num_blocks * 64)
    worker = _kvx.Worker(_socket(vllm_config), 0, 0)
    worker.register_kv_caches(layers=[("layer", pool.address(), num_blocks, 64, 64, 0, 1)], layout="LBHNC", block_tokens=block,
                              kernel_per_logical=1, transposed_keys=False, address=pool.address(), len=num_blocks * 64,
                              owner=pool, pool=pool, device=None)
    connector.set_xfer_handshake_metadata_pp_aware({{(0, 0): KvxHandshake({{}}, "a test")}})
    scheduler.kvx_worker = worker
    return scheduler


utils.create_vllm_config, utils.create_scheduler = create_vllm_config, create_scheduler
'''

os.makedirs(FOLDER, exist_ok=True)
names = [f"*/{UNIT}/{name}" for name in ["__init__.py", "conftest.py", "utils.py", *TESTS]]
names += [f"*/{folder}/__init__.py" for folder in ("tests", "tests/v1", "tests/v1/kv_connector")]
subprocess.run(["tar", "xzf", sources(WORK, VERSION), "-C", FOLDER, "--strip-components=1", "--wildcards", *names], check=True)
with open(os.path.join(FOLDER, "with_kvx.py"), "w") as plugin:
    plugin.write(PLUGIN.format(model=os.path.join(WORK, "models/tiny-float32"), version=VERSION))
environment = dict(os.environ, PYTHONPATH=":".join(filter(None, [SITE, FOLDER, fetch(WORK, VERSION)])), HF_HUB_OFFLINE="1", VLLM_TARGET_DEVICE="cpu", KVX_LOG="error",
                   VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1")
command = [sys.executable, "-m", "pytest", "-p", "with_kvx", "-p", "no:cacheprovider", "-v", "--rootdir", FOLDER, "-o", "markers=cpu_test: of vLLM"]
for name, why in NOT_OURS.items():
    print(f"left out: {name}: {why}")
    command += ["--deselect", f"{UNIT}/{name}"]
command += [os.path.join(FOLDER, UNIT, name) for name in TESTS]
sys.exit(subprocess.run(command, cwd=FOLDER, env=environment, timeout=900).returncode)
