//! Advice for pairs that move no blocks.

use kvx_proxy::{FleetTrial, PairReport, Role};

/// Returns what to do about a cause that the instances' counters and settings tell.
pub(super) fn known(pair: &PairReport, trial: &FleetTrial) -> Option<String> {
    let has = |kinds: &[&str]| pair.failures.iter().any(|kind| kinds.contains(&&**kind));
    let side_channel = pair.side_channel.as_deref().unwrap_or("the side channel");
    if has(&["authentication"]) {
        return Some(
            "the secrets of the two differ, or one has none: give both the same KVX_SECRET_FILE \
             (`kvx secret FILE` makes one)"
                .to_owned(),
        );
    }
    if has(&["peer_lost", "timed_out", "malformed", "native"]) {
        return Some(format!(
            "the decode does not reach {side_channel}: open that port to it, or set the prefill's \
             VLLM_NIXL_SIDE_CHANNEL_HOST to an address that the decode reaches"
        ));
    }
    if has(&["no_route"]) {
        return Some(
            "the decode reaches the prefill's side channel, and not its agent: open its ports \
             (`tcp.ports` or KVX_TCP_PORTS), set its `tcp.bind` to an address that the decode \
             reaches, or name a backend that both have in `backends`; the decode's log says which"
                .to_owned(),
        );
    }
    if has(&["peer_restarted"]) {
        return Some(format!(
            "another engine answers at {side_channel}: two engines share this address, or the \
             prefill has restarted meanwhile. Give each engine its own \
             VLLM_NIXL_SIDE_CHANNEL_HOST and VLLM_NIXL_SIDE_CHANNEL_PORT"
        ));
    }
    let size = |name: &str, role| {
        let one = trial.instances.iter().find(|one| one.name == name && one.role == role);
        one.and_then(|one| one.block_size)
    };
    let sizes = (size(&pair.prefill, Role::Prefill), size(&pair.decode, Role::Decode));
    if let (Some(ours), Some(theirs)) = sizes
        && ours != theirs
    {
        return Some(format!(
            "start both with one `--block-size`: the prefill has {ours}, the decode {theirs}"
        ));
    }
    has(&["incompatible"]).then(|| {
        format!(
            "the engine at {side_channel} does not fit the decode: another model, version, type or \
             layout. `kvx probe {side_channel} --api http://{} -- ARGS`, with the decode's \
             arguments, names the difference",
            pair.prefill
        )
    })
}

/// Returns what to do about a pair that fails.
pub(super) fn of(pair: &PairReport, trial: &FleetTrial) -> String {
    known(pair, trial).unwrap_or_else(|| of_message(pair.why.as_deref().unwrap_or_default()))
}

/// Returns what to do about an error that an instance gave.
fn of_message(why: &str) -> String {
    let has = |needle: &str| why.contains(needle);
    let messages = [
        (
            has("signature") || has("secret"),
            "give all engines of the fleet the same KVX_SECRET_FILE (`kvx secret FILE` makes one)",
        ),
        (
            has("hash mismatch") || has("kv_compat"),
            "give both engines the same model name, vLLM version and --dtype; `kvx probe` names \
                 the difference",
        ),
        (
            has("block size") || has("block_size") || has("blocks of"),
            "start both engines with one `--block-size`",
        ),
        (
            has("engine id mismatch") || has("another engine"),
            "the prefill was restarted, or two engines share one side channel: give each its own \
                 VLLM_NIXL_SIDE_CHANNEL_PORT and host, then try again",
        ),
        (
            has("no backend serves"),
            "name a backend that both have in `backends`; `kvx doctor` on both hosts shows what \
                 works there",
        ),
        (
            has("no connection") || has("nobody listens") || has("handshake") || has("connect"),
            "the decode's host must reach the address that the message names: open that port, or \
                 set the prefill's VLLM_NIXL_SIDE_CHANNEL_HOST and KVX_TCP_BIND to its address",
        ),
        (
            has("in time") || has("silent"),
            "look whether that instance hangs, or a firewall drops packets to the port that the \
                 decode's log names",
        ),
    ];
    let found = messages.iter().find(|(is_it, _)| *is_it).map(|(_, cure)| *cure);
    found
        .unwrap_or(
            "the logs of both instances have more; docs/operations/troubleshooting.md \
         lists the messages",
        )
        .to_owned()
}
