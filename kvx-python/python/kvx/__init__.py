"""kvx: moves KV cache between LLM inference servers.

`kvx.vllm` has the connector for vLLM. `python -m kvx` is the program `kvx`, and
`python -m kvx nixl install` puts the backend KVX into the NIXL of this environment."""

import os

#: The folder with the program `kvx` and libplugin_KVX.so.
FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "bin")
#: The program `kvx`.
KVX = os.path.join(FOLDER, "kvx")
