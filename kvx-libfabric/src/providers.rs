//! Which provider is used, on which domains, and what can be promised of it.

use std::time::Duration;

use kvx_backend::capabilities::of_library;
use kvx_backend::devices::rdma_devices;
use kvx_core::{
    Capabilities, Error, ErrorKind, Idle, Isolation, MemoryKind, MemoryKinds, PerOp, Result,
};

use crate::config::{Config, MAX_RAILS};
use crate::error::{self, NAME};
use crate::ffi::bindings_1_17::{FI_MR_PROV_KEY, FI_MR_VIRT_ADDR};
use crate::ffi::{Info, Infos, Library, ProviderQuery, Version};

/// A provider that kvx knows, by the first word of its name.
struct KnownProvider {
    name: &'static str,
    rdma: bool,
    /// The first version of libfabric whose provider of this name is used.
    since: Version,
    isolation: Isolation,
    /// Whether the provider at the target must be called for its memory to be read and written.
    target_cpu: bool,
    /// Whether what was posted ends whatever the peer does.
    settles: bool,
}

/// In the order of preference. EFA and verbs are not known to work before 1.21: NIXL, which is run
/// over both, asks for that version, and 1.17 has neither `FI_MR_DMABUF` nor EFA's
/// writes by the card.
const KNOWN: &[KnownProvider] = &[
    // Cards of the first generations emulate writes with the target's CPU, and no attribute tells
    // them apart.
    KnownProvider {
        name: "efa",
        rdma: true,
        since: Version::of(1, 21),
        isolation: Isolation::Nic,
        target_cpu: true,
        settles: false,
    },
    KnownProvider {
        name: "verbs",
        rdma: true,
        since: Version::of(1, 21),
        isolation: Isolation::Nic,
        target_cpu: false,
        settles: true,
    },
    // Its owner's library checks key and range of each request, and answers it.
    KnownProvider {
        name: "tcp",
        rdma: false,
        since: Version::of(1, 17),
        isolation: Isolation::Owner,
        target_cpu: true,
        settles: false,
    },
    // We copy out of, or into, the other process, before a post returns.
    KnownProvider {
        name: SHARED,
        rdma: false,
        since: Version::of(1, 17),
        isolation: Isolation::Cooperative,
        target_cpu: false,
        settles: true,
    },
];

/// The assumption about other providers.
const OTHER: KnownProvider = KnownProvider {
    name: "",
    rdma: false,
    since: Version::of(1, 17),
    isolation: Isolation::Cooperative,
    target_cpu: true,
    settles: false,
};

/// The provider over shared memory.
const SHARED: &str = "shm";
/// How long the first message to a peer may be on its way: the provider makes a connection for it,
/// or exchanges names, in several turns of both ends, each of which may have to wait for a core.
pub(crate) const SETS_UP: Duration = Duration::from_secs(2);
/// How a peer's end becomes known that closes no connection: pings that it does not answer, or its
/// process on this host. A first link has the time to make its connection besides.
const LOSS: Duration = Duration::from_secs(5).saturating_add(SETS_UP);

fn known(provider: &str) -> &'static KnownProvider {
    let first = provider.split(';').next().unwrap_or_default();
    KNOWN.iter().find(|known| known.name == first).unwrap_or(&OTHER)
}

/// Returns whether it reads and writes memory of processes of this host.
pub(crate) fn is_shared_memory(provider: &str) -> bool {
    known(provider).name == SHARED
}

/// Returns whether it has a card that does so on its own.
pub(crate) fn is_rdma(provider: &str) -> bool {
    known(provider).rdma
}

/// The most pieces that are posted in a turn: more at a time lower the rate of some cards.
pub(crate) fn turn(provider: &str) -> u32 {
    if is_rdma(provider) { 32 } else { 64 }
}

/// How large ofi_rxm's buffers may be: they hold kvx's messages then, and a flood of messages costs
/// little.
const SMALL: usize = 4352;
/// Their size, and what ofi_rxm compares with a peer's when it connects. No attribute tells either.
const SIZE: &str = "FI_OFI_RXM_BUFFER_SIZE";
const LIMIT: &str = "FI_OFI_RXM_EAGER_LIMIT";
const UNBOUNDED: &str = "whoever reaches its port can have ofi_rxm keep messages without a bound, and others wait meanwhile: set FI_OFI_RXM_BUFFER_SIZE=4352 and FI_OFI_RXM_EAGER_LIMIT=16384 in the environment (`kvx serve` does), or use the backend TCP";
const ALONE: &str = "ofi_rxm refuses peers whose FI_OFI_RXM_BUFFER_SIZE is another, or is not set: set FI_OFI_RXM_EAGER_LIMIT=16384 beside it";

/// Returns what the operator should know of a provider, if anything.
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

/// The values that bound it, which the cautions name.
const BOUNDED: [(&str, &str); 2] = [(SIZE, "4352"), (LIMIT, "16384")];

/// See [`Libfabric::bound_kept_messages`](crate::Libfabric::bound_kept_messages).
///
/// # Safety
/// No other thread uses the environment meanwhile.
pub(crate) unsafe fn bound_kept_messages() {
    if !rdma_devices().is_empty()
        || BOUNDED.iter().any(|(variable, _)| std::env::var_os(variable).is_some())
    {
        return;
    }
    for (variable, value) in BOUNDED {
        // SAFETY: the caller vouches for it that nobody else looks.
        unsafe { std::env::set_var(variable, value) };
    }
}

/// Its promises, beside those that a link knows.
pub(crate) fn capabilities(provider: &str, idle: Idle, memory: MemoryKinds) -> Capabilities {
    let KnownProvider { isolation, target_cpu, settles, .. } = *known(provider);
    Capabilities {
        isolation: PerOp::same(isolation),
        idle,
        target_cpu: PerOp::same(target_cpu),
        peer_loss_within: Some(LOSS),
        settles_without_peer: PerOp::same(settles),
        ..of_library(memory)
    }
}

/// The kinds of memory that a provider moves when the machine has devices of these kinds.
pub(crate) fn kinds(info: &Info, devices: &[MemoryKind]) -> MemoryKinds {
    let moves = |kind: &MemoryKind| kind.is_host() || info.has_devices() && devices.contains(kind);
    MemoryKinds::of(&MemoryKind::ALL.into_iter().filter(moves).collect::<Vec<_>>())
}

/// The provider that is used, an entry for each rail. `devices`: ask it to reach device memory, if
/// it can. Errors: `Unavailable`, `Unsupported`, libfabric's.
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
        .map(|info| info.copy().map_err(|errno| error::native("no memory for a name", errno)))
        .collect()
}

/// The first provider of those that kvx prefers that there is, else the first that libfabric shows.
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
        let why = "libfabric has no provider with which memory of peers is read and written: check FI_PROVIDER, and `fi_info`";
        Error::new(ErrorKind::Unavailable, why).with_backend(NAME)
    })
}

fn query(library: &'static Library, asked: ProviderQuery<'_>) -> Result<Infos> {
    Infos::find(library, asked)
        .map_err(|errno| error::native("libfabric does not say what it has", errno))
}

/// Errors: `Unavailable`, with the version that is needed.
fn check_version(library: &Library, provider: &str) -> Result<()> {
    let known = known(provider);
    if library.version() >= known.since {
        return Ok(());
    }
    let why = format!(
        "{provider} is used from libfabric {} on, and {} is {}: set KVX_LIBFABRIC_LIB to a newer one (EFA's installer brings one)",
        known.since,
        library.path().display(),
        library.version()
    );
    Err(Error::new(ErrorKind::Unavailable, why).with_backend(NAME))
}

/// Over shared memory bytes are moved by copies from process to process alone. Errors:
/// `Unavailable`, where somebody does not want them.
fn check_copies() -> Result<()> {
    const VARIABLE: &str = "FI_SHM_DISABLE_CMA";
    let value = std::env::var(VARIABLE).unwrap_or_default().to_ascii_lowercase();
    if matches!(value.as_str(), "" | "0" | "n" | "no" | "false" | "off") {
        return Ok(());
    }
    let why = format!(
        "kvx moves bytes over shm by copies from process to process, which {VARIABLE}={value} forbids: unset it, or use the backend SHM"
    );
    Err(Error::new(ErrorKind::Unavailable, why).with_backend(NAME))
}

/// The offers of a provider. Errors: `Unavailable`; `Unsupported` if it does not say when writes
/// can be seen.
fn find(library: &'static Library, provider: &str, devices: bool) -> Result<Infos> {
    // Over shared memory a post copies before it returns. Asked to say so, 1.17 would have the
    // target's CPU copy instead; asked to reach devices as well, and it would report a write before
    // its bytes can be seen.
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
        let why = "cannot say when written bytes can be seen at the target (FI_DELIVERY_COMPLETE), which notifications after their data need";
        (
            ErrorKind::Unsupported,
            format!("libfabric's provider {provider} {why}: name another \"libfabric.provider\""),
        )
    } else {
        let why =
            "with which memory of peers is read and written over endpoints without connections";
        let cure =
            "name another \"libfabric.provider\", or check FI_PROVIDER; `fi_info` lists them";
        (ErrorKind::Unavailable, format!("libfabric has no provider {provider} {why}: {cure}"))
    };
    Err(Error::new(kind, why).with_backend(NAME))
}

/// The entry of each domain that is used: those that were named; else every card, or the loopback
/// interface.
fn on_domains<'a>(found: &'a Infos, config: &Config, provider: &str) -> Result<Vec<&'a Info>> {
    let of = |domain: &str| found.iter().find(|info| info.domain() == domain);
    let mut domains: Vec<String> = Vec::new();
    for domain in found.iter().map(Info::domain) {
        if !domains.contains(&domain) {
            domains.push(domain);
        }
    }
    let missing = |domain: &str| {
        let why = format!(
            "{provider} has no domain {domain}: name one of {} as \"libfabric.domain\"",
            domains.join(", ")
        );
        Error::new(ErrorKind::Unavailable, why).with_backend(NAME)
    };
    if !config.domains.is_empty() {
        return config
            .domains
            .iter()
            .map(|domain| of(domain).ok_or_else(|| missing(domain)))
            .collect();
    }
    if is_rdma(provider) {
        return Ok(domains.iter().filter_map(|domain| of(domain)).take(MAX_RAILS).collect());
    }
    if is_shared_memory(provider) {
        return Ok(found.iter().take(1).collect());
    }
    // Whoever wants to be reached from other hosts says so.
    Ok(vec![of("lo").ok_or_else(|| missing("lo"))?])
}

/// Every provider on every domain, with what it can do.
pub(crate) fn list(library: &'static Library) -> Result<Vec<String>> {
    let all = query(library, ProviderQuery::default())?;
    let delivering = query(library, ProviderQuery { delivery: true, ..ProviderQuery::default() })?;
    let mut listed: Vec<String> = Vec::new();
    for info in all.iter() {
        let (provider, domain) = (info.provider(), info.domain());
        let same = |other: &Info| other.provider() == provider && other.domain() == domain;
        let mut can = vec![
            if info.wants(FI_MR_VIRT_ADDR) { "by address" } else { "by offset" },
            if info.wants(FI_MR_PROV_KEY) { "its own keys" } else { "our keys" },
        ];
        if is_shared_memory(&provider) {
            can.push("bytes copied by kvx through the kernel");
        } else if delivering.iter().any(same) {
            can.push("delivery");
        } else {
            can.push("not used: no delivery");
        }
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
