# The router alone: one static program in an empty image.
# This file has never been built: `cargo xtask router` builds the same program, and runs it in an
# empty folder (chroot).
#
#   docker build -f deploy/docker/router.Dockerfile -t kvx-router:0.1.0 .
FROM rust:1-bookworm AS build
WORKDIR /kvx
COPY . .
# As ROUTER in xtask/src/release.rs. A target names the flags' crates: build scripts and procedural
# macros cannot be static.
ENV RUSTFLAGS="-C target-feature=+crt-static"
RUN cargo build --release --locked --target x86_64-unknown-linux-gnu -p kvx-cli --bin kvx \
        --no-default-features --features shm,tcp,proxy,release,tls \
    && strip target/x86_64-unknown-linux-gnu/release/kvx

# Names are found by the resolver in the program, from the /etc/resolv.conf and /etc/hosts that
# Docker and Kubernetes mount. There are no certificates: for https to etcd, mount a file and name
# it in SSL_CERT_FILE.
FROM scratch
COPY --from=build /kvx/target/x86_64-unknown-linux-gnu/release/kvx /kvx
USER 65532:65532
EXPOSE 8000
ENTRYPOINT ["/kvx"]
CMD ["proxy", "--help"]
