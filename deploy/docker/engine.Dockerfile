# An example of an engine: vLLM's image with kvx's Python wheel, which has KvxConnector and the
# program `kvx`.
# This file has never been built. kvx's wheel was run with vLLM on CPUs, never on a GPU
# (docs/operations/vllm-connector.md).
#
#   cargo xtask wheel
#   docker build -f deploy/docker/engine.Dockerfile -t kvx-vllm:0.1.0 target/xtask/wheel
ARG VLLM=vllm/vllm-openai:v0.33.0
FROM ${VLLM}
COPY kvx-0.1.0-*.whl /tmp/
# Into the environment of the `vllm` in PATH. The wheel needs no other package.
RUN python3 -m pip install --no-index /tmp/kvx-0.1.0-*.whl && rm /tmp/kvx-0.1.0-*.whl \
    && python3 -c 'import kvx.vllm'
