# An image for contributors: everything that `cargo xtask test --install` needs on Debian 12, and the Rust toolchain.
# This file has never been run.
#
#   docker build -t kvx .
#   docker run --rm -it --cap-add NET_ADMIN --cap-add SYS_ADMIN --cap-add SYS_PTRACE \
#       --shm-size 4g -v "$PWD:/kvx" kvx cargo xtask test --install
#
# NET_ADMIN and SYS_ADMIN are for tests that cut links in network namespaces, SYS_PTRACE is for reads of another
# process's memory. Where one is missing, tests that need it are skipped and say so.
FROM rust:1-bookworm

RUN rustup component add clippy rustfmt

# `cargo xtask test --install` installs the same packages, by xtask/install.toml; here they are part of the image.
RUN apt-get update \
    && apt-get install -y --no-install-recommends \
        dnsmasq-base etcd-server g++ iproute2 iptables kubernetes-client libamdhip64-5 libclang-dev libcurl4 \
        libfabric-bin libfabric-dev libfabric1 \
        libhiprtc-builtins5 libibverbs1 libjemalloc2 libnuma1 libpython3.11 libtcmalloc-minimal4 libucx-dev libucx0 \
        python3-pip python3-venv systemd ucx-utils \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /kvx
