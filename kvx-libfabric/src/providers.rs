//! Chooses the provider and its domains, and determines its capabilities.

use std::time::Duration;

use kvx_backend::capabilities::of_library;
use kvx_backend::devices::rdma_devices;
use kvx_core::{
    Capabilities, Error, ErrorKind, HungPageScope, Idle, Isolation, MemoryKind, MemoryKinds, PerOp,
    Result,
};

use crate::config::{Config, MAX_RAILS};
use crate::error::{self, NAME};
use crate::ffi::bindings_1_17::{FI_MR_PROV_KEY, FI_MR_VIRT_ADDR};
use crate::ffi::{Info, Infos, Library, ProviderQuery, Version};

/// A provider that kvx knows, by the first part of its name.
struct KnownProvider {
    name: &'static str,
    rdma: bool,
    /// The first version of libfabric whose provider of this name kvx uses.
    since: Version,
    isolation: PerOp<Isolation>,
    /// True if peers can access the target's memory only while it calls the provider.
    target_cpu: bool,
    /// True if posted operations end whatever the peer does.
    settles: bool,
    hung_page: HungPageScope,
}

/// The known providers, in order of preference. EFA and verbs are not known to work before 1.21,
/// the version that NIXL requires for both; 1.17 has neither `FI_MR_DMABUF` nor EFA's hardware
/// writes.
const KNOWN: &[KnownProvider] = &[
    // Early cards emulate writes with the target's CPU, and no attribute tells which.
    KnownProvider {
        name: "efa",
        rdma: true,
        since: Version::of(1, 21),
        isolation: PerOp::same(Isolation::Nic),
        target_cpu: true,
        settles: false,
        hung_page: HungPageScope::Agent,
    },
    KnownProvider {
        name: "verbs",
        rdma: true,
        since: Version::of(1, 21),
        // A write to memory that is registered for reads alone succeeded (2.5.1 on soft-RoCE).
        isolation: PerOp { read: Isolation::Nic, write: Isolation::Cooperative },
        target_cpu: false,
        settles: true,
        hung_page: HungPageScope::None,
    },
    // The owner's library checks key and range of each request, and answers it.
    KnownProvider {
        name: "tcp",
        rdma: false,
        since: Version::of(1, 17),
        isolation: PerOp::same(Isolation::Owner),
        target_cpu: true,
        settles: false,
        hung_page: HungPageScope::Agent,
    },
    // kvx copies from or to the other process before a post returns.
    KnownProvider {
        name: SHARED,
        rdma: false,
        since: Version::of(1, 17),
        isolation: PerOp::same(Isolation::Cooperative),
        target_cpu: false,
        settles: true,
        hung_page: HungPageScope::Agent,
    },
];

/// The properties of unknown providers.
const OTHER: KnownProvider = KnownProvider {
    name: "",
    rdma: false,
    since: Version::of(1, 17),
    isolation: PerOp::same(Isolation::Cooperative),
    target_cpu: true,
    settles: false,
    hung_page: HungPageScope::Agent,
};

/// The shared memory provider.
const SHARED: &str = "shm";
/// The time that the first message to a peer may take. The provider creates a connection, or
/// exchanges names, in several turns of both ends, each of which may have to wait for CPU time.
pub(crate) const SETS_UP: Duration = Duration::from_secs(2);
/// The time within which kvx detects a peer that ended without closing its connections: by
/// unanswered pings, or by its process on this host. A first link needs time to connect as well.
const LOSS: Duration = Duration::from_secs(5).saturating_add(SETS_UP);

fn known(provider: &str) -> &'static KnownProvider {
    let name = core_provider(provider);
    KNOWN.iter().find(|known| known.name == name).unwrap_or(&OTHER)
}

/// Returns whether a layer above the core provider has this name.
fn has_layer(provider: &str, name: &str) -> bool {
    provider.split(';').skip(1).any(|layer| layer == name)
}

/// Returns the name of the provider below all layers: `tcp` for `tcp;ofi_rxm`.
fn core_provider(provider: &str) -> &str {
    provider.split(';').next().unwrap_or_default()
}

/// Returns whether the provider accesses memory of processes on this host.
pub(crate) fn is_shared_memory(provider: &str) -> bool {
    known(provider).name == SHARED
}

/// How kvx knows that written bytes are visible at the target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DeliveryProof {
    /// The provider completes a write when they are (`FI_DELIVERY_COMPLETE`).
    Completion,
    /// A read of written bytes has completed: see [`read_back`](crate::read_back).
    ReadBack,
    /// kvx copies them before a post returns.
    Copy,
}

/// Returns how a write over a provider is proven. ofi_rxm accepts `FI_DELIVERY_COMPLETE` and passes
/// it down; of the providers below it, only tcp is known to keep it.
pub(crate) fn delivery_proof(provider: &str) -> DeliveryProof {
    match core_provider(provider) {
        SHARED => DeliveryProof::Copy,
        core if has_layer(provider, "ofi_rxm") && core != "tcp" => DeliveryProof::ReadBack,
        _ => DeliveryProof::Completion,
    }
}

/// Returns whether the provider uses a card that accesses memory itself.
pub(crate) fn is_rdma(provider: &str) -> bool {
    known(provider).rdma
}

/// Returns whether the addresses of the provider's endpoints are those of sockets of the kernel's
/// TCP. verbs listens at a port of RDMA's connection manager, which has the same form.
pub(crate) fn listens_over_tcp(provider: &str) -> bool {
    const OVER_TCP: [&str; 3] = ["tcp", "net", "sockets"];
    OVER_TCP.contains(&core_provider(provider))
}

/// Returns the maximum number of pieces per turn: more lower the rate of some cards.
pub(crate) fn turn(provider: &str) -> u32 {
    if is_rdma(provider) { 32 } else { 64 }
}

/// The largest buffer size of ofi_rxm at which a flood of messages is harmless; such buffers hold
/// kvx's messages.
const SMALL: usize = 4352;
/// Variables for the buffer size, and for the limit that ofi_rxm compares with the peer's when it
/// connects. No attribute reports either.
const SIZE: &str = "FI_OFI_RXM_BUFFER_SIZE";
const LIMIT: &str = "FI_OFI_RXM_EAGER_LIMIT";
const UNBOUNDED: &str = "anyone who can reach its port can make ofi_rxm buffer messages without a bound and delay other peers: set FI_OFI_RXM_BUFFER_SIZE=4352 and FI_OFI_RXM_EAGER_LIMIT=16384 in the environment (`kvx serve` does), or use the backend TCP";
const ALONE: &str = "ofi_rxm refuses peers whose FI_OFI_RXM_BUFFER_SIZE differs or is not set: also set FI_OFI_RXM_EAGER_LIMIT=16384";

/// Returns a warning about a provider for the operator, if any.
pub(crate) fn caution(provider: &str) -> Option<&'static str> {
    if provider != "tcp;ofi_rxm" {
        return None;
    }
    let number = |variable| std::env::var(variable).ok()?.parse::<usize>().ok();
    match (number(SIZE), number(LIMIT)) {
        (Some(..=SMALL), Some(_)) => None,
        (Some(..=SMALL), None) => Some(ALONE),
        _ => Some(UNBOUNDED),
    }
}

/// The values that bound the buffers, as the warnings say.
const BOUNDED: [(&str, &str); 2] = [(SIZE, "4352"), (LIMIT, "16384")];

/// See [`Libfabric::bound_kept_messages`](crate::Libfabric::bound_kept_messages).
///
/// # Safety
/// No other thread uses the environment during the call.
pub(crate) unsafe fn bound_kept_messages() {
    if !rdma_devices().is_empty()
        || BOUNDED.iter().any(|(variable, _)| std::env::var_os(variable).is_some())
    {
        return;
    }
    for (variable, value) in BOUNDED {
        // SAFETY: the caller guarantees that no other thread uses the environment.
        unsafe { std::env::set_var(variable, value) };
    }
}

/// Returns the provider's capabilities, except those that depend on the link.
pub(crate) fn capabilities(provider: &str, idle: Idle, memory: MemoryKinds) -> Capabilities {
    // ofi_rxd sends datagrams, whatever the card could do, and the target's library takes them.
    let known = if has_layer(provider, "ofi_rxd") { &OTHER } else { known(provider) };
    let KnownProvider { isolation, target_cpu, settles, hung_page, .. } = *known;
    Capabilities {
        isolation,
        idle,
        target_cpu: PerOp::same(target_cpu),
        peer_loss_within: Some(LOSS),
        settles_without_peer: PerOp::same(settles),
        hung_page,
        ..of_library(memory)
    }
}

/// Returns the kinds of memory that a provider moves on a machine with these kinds of device.
pub(crate) fn kinds(info: &Info, devices: &[MemoryKind]) -> MemoryKinds {
    let moves = |kind: &MemoryKind| kind.is_host() || info.has_devices() && devices.contains(kind);
    MemoryKinds::of(&MemoryKind::ALL.into_iter().filter(moves).collect::<Vec<_>>())
}

/// Chooses the provider, with an entry for each rail. `devices` requests access to device memory,
/// if the provider supports it. Errors: `Unavailable`, `Unsupported`, libfabric's.
pub(crate) fn choose(
    library: &'static Library,
    config: &Config,
    devices: bool,
) -> Result<Vec<Infos>> {
    let provider = match &config.provider {
        Some(provider) => provider.clone(),
        None => preferred(library)?,
    };
    check_version(library, &provider)?;
    if is_shared_memory(&provider) {
        check_copies()?;
    }
    let found = find(library, &provider, devices)?;
    let rails = on_domains(&found, config, &provider)?;
    rails
        .into_iter()
        .map(|info| {
            info.copy()
                .map_err(|errno| error::native("could not copy an entry of fi_getinfo", errno))
        })
        .collect()
}

/// Returns the first available provider in kvx's order of preference, otherwise the first that
/// libfabric lists.
fn preferred(library: &'static Library) -> Result<String> {
    for known in
        KNOWN.iter().filter(|known| known.name != SHARED && library.version() >= known.since)
    {
        let asked = ProviderQuery {
            provider: Some(known.name),
            delivery: true,
            ..ProviderQuery::default()
        };
        if query(library, asked)?.iter().next().is_some() {
            return Ok(known.name.to_owned());
        }
    }
    let all = query(library, ProviderQuery::default())?;
    all.iter().next().map(Info::provider).ok_or_else(|| {
        let why = "libfabric has no provider that supports FI_RMA on RDM endpoints: check FI_PROVIDER and `fi_info`";
        ErrorKind::Unavailable.because(why).with_backend(NAME)
    })
}

fn query(library: &'static Library, asked: ProviderQuery<'_>) -> Result<Infos> {
    Infos::find(library, asked).map_err(|errno| error::native("fi_getinfo failed", errno))
}

/// Checks the version that a provider needs. Errors: `Unavailable`, with that version.
fn check_version(library: &Library, provider: &str) -> Result<()> {
    let known = known(provider);
    if library.version() >= known.since {
        return Ok(());
    }
    let why = format!(
        "kvx uses {provider} from libfabric {} on, and {} is {}: set KVX_LIBFABRIC_LIB to a newer \
         one (EFA's installer includes one)",
        known.since,
        library.path().display(),
        library.version()
    );
    Err(ErrorKind::Unavailable.because(why).with_backend(NAME))
}

/// Checks that copies between processes are allowed: kvx moves bytes over shared memory in no other
/// way. Errors: `Unavailable`, if the user forbids them.
fn check_copies() -> Result<()> {
    const VARIABLE: &str = "FI_SHM_DISABLE_CMA";
    let value = std::env::var(VARIABLE).unwrap_or_default().to_ascii_lowercase();
    if matches!(value.as_str(), "" | "0" | "n" | "no" | "false" | "off") {
        return Ok(());
    }
    let why = format!(
        "kvx moves bytes over shm by copies between processes, which {VARIABLE}={value} forbids: \
         unset it, or use the backend SHM"
    );
    Err(ErrorKind::Unavailable.because(why).with_backend(NAME))
}

/// Returns the entries of a provider. Errors: `Unavailable`; `Unsupported` if it does not accept
/// `FI_DELIVERY_COMPLETE`. ofi_rxm accepts it itself: see [`delivery_proof`].
fn find(library: &'static Library, provider: &str, devices: bool) -> Result<Infos> {
    // Over shared memory a post copies before it returns. With `FI_DELIVERY_COMPLETE`, 1.17 would
    // let the target's CPU copy; with `FI_HMEM`, it would report a write before its bytes are
    // visible.
    let shared = is_shared_memory(provider);
    let asked = ProviderQuery { provider: Some(provider), devices: false, delivery: !shared };
    if devices && !shared {
        let found = query(library, ProviderQuery { devices: true, ..asked })?;
        if found.iter().next().is_some() {
            return Ok(found);
        }
    }
    let found = query(library, asked)?;
    if found.iter().next().is_some() {
        return Ok(found);
    }
    let without = query(library, ProviderQuery { delivery: false, ..asked })?;
    let (kind, why) = if without.iter().next().is_some() {
        let why = "does not report when written bytes are visible at the target (FI_DELIVERY_COMPLETE), which notifications require";
        (
            ErrorKind::Unsupported,
            format!("libfabric's provider {provider} {why}: name another \"libfabric.provider\""),
        )
    } else {
        let why = "that supports FI_RMA on RDM endpoints";
        let cure =
            "name another \"libfabric.provider\", or check FI_PROVIDER; `fi_info` lists them";
        (ErrorKind::Unavailable, format!("libfabric has no provider {provider} {why}: {cure}"))
    };
    Err(Error::new(kind, why).with_backend(NAME))
}

/// Returns the entries of the domains to use: the configured ones, otherwise every card or the
/// loopback interface. Errors: `Unavailable`, `Invalid` if domains of several providers are
/// configured.
fn on_domains<'a>(found: &'a Infos, config: &Config, provider: &str) -> Result<Vec<&'a Info>> {
    let of = |domain: &str| {
        found.iter().find(|info| info.domain() == domain).ok_or_else(|| {
            let mut domains: Vec<String> = Vec::new();
            for domain in found.iter().map(Info::domain) {
                if !domains.contains(&domain) {
                    domains.push(domain);
                }
            }
            let why = format!(
                "{provider} has no domain {domain}: name one of {} as \"libfabric.domain\"",
                domains.join(", ")
            );
            ErrorKind::Unavailable.because(why).with_backend(NAME)
        })
    };
    if !config.domains.is_empty() {
        let rails: Vec<_> =
            config.domains.iter().map(|domain| of(domain)).collect::<Result<_>>()?;
        return of_one_provider(&rails).map(|()| rails);
    }
    if is_rdma(provider) {
        return Ok(one_for_each_card(found));
    }
    if is_shared_memory(provider) {
        return Ok(found.iter().take(1).collect());
    }
    // To be reachable from other hosts, the user must name an interface.
    Ok(vec![of("lo")?])
}

/// Checks that peers can use one form of addresses for all rails. Errors: `Invalid`.
fn of_one_provider(rails: &[&Info]) -> Result<()> {
    let Some((first, others)) = rails.split_first() else { return Ok(()) };
    let Some(other) = others.iter().find(|info| info.provider() != first.provider()) else {
        return Ok(());
    };
    let why = format!(
        "domain {} is of the provider {} and domain {} of {}: name only domains of one provider as \"libfabric.domain\"",
        first.domain(),
        first.provider(),
        other.domain(),
        other.provider()
    );
    Err(ErrorKind::Invalid.because(why).with_backend(NAME))
}

/// Returns an entry for each card. All have the provider of the first one: for each card, verbs
/// also lists domains for datagrams and for shared queue pairs, whose addresses differ.
fn one_for_each_card(found: &Infos) -> Vec<&Info> {
    let mut rails: Vec<&Info> = Vec::new();
    for info in found.iter() {
        let fits = rails
            .iter()
            .all(|rail| rail.provider() == info.provider() && rail.card() != info.card());
        if fits && rails.len() < MAX_RAILS {
            rails.push(info);
        }
    }
    rails
}

/// Lists every provider on every domain, with its properties.
pub(crate) fn list(library: &'static Library) -> Result<Vec<String>> {
    let all = query(library, ProviderQuery::default())?;
    let delivering = query(library, ProviderQuery { delivery: true, ..ProviderQuery::default() })?;
    let mut listed: Vec<String> = Vec::new();
    for info in all.iter() {
        let (provider, domain) = (info.provider(), info.domain());
        let same = |other: &Info| other.provider() == provider && other.domain() == domain;
        let mut can = vec![
            if info.wants(FI_MR_VIRT_ADDR) { "by address" } else { "by offset" },
            if info.wants(FI_MR_PROV_KEY) {
                "keys chosen by the provider"
            } else {
                "keys chosen by kvx"
            },
        ];
        can.push(match delivery_proof(&provider) {
            DeliveryProof::Copy => "bytes copied by kvx through the kernel",
            _ if !delivering.iter().any(same) => "not used: no delivery",
            DeliveryProof::ReadBack => "delivery proven by reads",
            DeliveryProof::Completion => "delivery",
        });
        if info.is_progressed_by_hand() && !is_shared_memory(&provider) {
            can.push("target's CPU");
        }
        if info.has_devices() {
            can.push("devices");
        }
        let too_old = check_version(library, &provider).is_err();
        if too_old {
            can.push("not used: too old");
        }
        let line = format!("{provider}/{domain} ({})", can.join(", "));
        if !listed.contains(&line) {
            listed.push(line);
        }
    }
    Ok(listed)
}

#[cfg(test)]
mod tests {
    use kvx_core::Options;

    use super::*;

    const RXM: &std::ffi::CStr = c"verbs;ofi_rxm";
    const RXD: &std::ffi::CStr = c"verbs;ofi_rxd";

    fn domains(found: &Infos, options: &str) -> Result<Vec<String>> {
        let config = Config::read(&Options::parse(options).unwrap()).unwrap();
        on_domains(found, &config, "verbs").map(|rails| {
            rails.into_iter().map(|info| format!("{}/{}", info.provider(), info.domain())).collect()
        })
    }

    #[test]
    fn verbs_has_a_rail_for_each_card_and_none_for_its_datagrams() {
        let found = Infos::of_names(&[
            (RXM, c"mlx5_0", Some(c"mlx5_0")),
            (RXM, c"mlx5_0", Some(c"mlx5_0")),
            (RXM, c"mlx5_0-xrc", Some(c"mlx5_0")),
            (RXD, c"mlx5_0-dgram", Some(c"mlx5_0")),
            (RXD, c"mlx5_2-dgram", None),
            (RXM, c"mlx5_1", None),
        ]);
        let rails = domains(&found, "{}").unwrap();
        assert_eq!(rails, ["verbs;ofi_rxm/mlx5_0", "verbs;ofi_rxm/mlx5_1"]);
    }

    #[test]
    fn configured_domains_are_of_one_provider() {
        let found = Infos::of_names(&[(RXM, c"rxe0", None), (RXD, c"rxe0-dgram", None)]);
        let with = |domains_option: &str| {
            domains(&found, &format!(r#"{{"libfabric": {{"domain": {domains_option}}}}}"#))
        };
        assert_eq!(with(r#"["rxe0-dgram"]"#).unwrap(), ["verbs;ofi_rxd/rxe0-dgram"]);
        let mixed = with(r#"["rxe0", "rxe0-dgram"]"#).unwrap_err();
        assert_eq!(mixed.kind(), ErrorKind::Invalid);
        assert!(mixed.sentence().contains("verbs;ofi_rxd"), "{mixed}");
        let missing = with(r#"["mlx5_0"]"#).unwrap_err();
        assert!(missing.sentence().contains("one of rxe0, rxe0-dgram"), "{missing}");
    }

    #[test]
    fn a_card_accesses_memory_itself_except_below_ofi_rxd() {
        let over = |provider| capabilities(provider, Idle::Asleep, MemoryKinds::HOST);
        let (connected, datagrams) = (over("verbs;ofi_rxm"), over("verbs;ofi_rxd"));
        assert_eq!(connected.target_cpu, PerOp::NEITHER);
        assert_eq!(connected.settles_without_peer, PerOp::BOTH);
        assert_eq!(datagrams.target_cpu, PerOp::BOTH);
        assert_eq!(datagrams.settles_without_peer, PerOp::NEITHER);
        assert_eq!(datagrams.isolation, PerOp::same(Isolation::Cooperative));
    }

    #[test]
    fn only_a_provider_that_keeps_delivery_complete_is_trusted_with_it() {
        for (provider, proof) in [
            ("tcp;ofi_rxm", DeliveryProof::Completion),
            ("tcp", DeliveryProof::Completion),
            ("efa", DeliveryProof::Completion),
            ("verbs;ofi_rxd", DeliveryProof::Completion),
            ("verbs;ofi_rxm", DeliveryProof::ReadBack),
            ("psm3;ofi_rxm", DeliveryProof::ReadBack),
            ("shm", DeliveryProof::Copy),
        ] {
            assert_eq!(delivery_proof(provider), proof, "{provider}");
        }
    }

    #[test]
    fn only_sockets_of_the_kernel_listen_over_tcp() {
        for provider in ["tcp;ofi_rxm", "tcp", "net", "sockets"] {
            assert!(listens_over_tcp(provider), "{provider}");
        }
        for provider in ["verbs;ofi_rxm", "efa", "udp;ofi_rxd", "shm", "opx"] {
            assert!(!listens_over_tcp(provider), "{provider}");
        }
    }
}
