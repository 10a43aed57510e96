"""kvx: moves KV cache between LLM inference servers.

`kvx.vllm` has the connector for vLLM, and `python -m kvx` is the program `kvx`.
"""

__version__ = "0.1.0"
