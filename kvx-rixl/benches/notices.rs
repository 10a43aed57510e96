//! Measures notifications during transfers, without kvx: `kvx-rixl-bare notices SLICE polls
//! sleeps`.
//!
//! One thread reads 64 MiB repeatedly in slices of `SLICE` bytes, each a separate request. Between
//! two slices it sends the notifications that another thread has requested: NIXL has no other place
//! for them. The target is a process that polls NIXL all the time (`polls`), or one that sleeps
//! until the plugin's descriptors wake it (`sleeps`).

use std::collections::BTreeSet;
use std::os::fd::RawFd;
use std::ptr::null;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::{NixlAgent, done};
use kvx_backend::baseline::{Channel, shuffled};
use kvx_rixl::raw::NIXL_CAPI_SUCCESS;

/// The number of bytes of all blocks, and of one.
const BYTES: usize = 64 << 20;
const BLOCK: usize = 1 << 20;
/// The number of notifications, and the time between two of them.
const COUNT: usize = 500;
const GAP: Duration = Duration::from_millis(3);
/// The time that the target waits for one at most.
const PATIENCE: u64 = 5_000_000_000;
/// The content of the last one.
const END: u64 = 0;

/// Returns the time of a clock that both processes share, in nanoseconds.
fn now() -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: a location for the answer.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut now) };
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// Returns the epoll descriptors of this process.
fn watchers() -> BTreeSet<RawFd> {
    let entries = std::fs::read_dir("/proc/self/fd").expect("this process").flatten();
    let watchers = entries.filter(|entry| {
        std::fs::read_link(entry.path()).is_ok_and(|what| what.ends_with("anon_inode:[eventpoll]"))
    });
    watchers.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
}

/// Runs the target: serves its memory, and reports how long each notification took to arrive.
pub(crate) fn serve(channel: &Channel, polls: bool) {
    let before = watchers();
    let agent = NixlAgent::start(c"target");
    // SAFETY: a new set, and descriptors of this process.
    let set = unsafe {
        let set = libc::epoll_create1(0);
        for fd in watchers().difference(&before) {
            let mut event =
                libc::epoll_event { events: (libc::EPOLLIN | libc::EPOLLET) as u32, u64: 0 };
            libc::epoll_ctl(set, libc::EPOLL_CTL_ADD, *fd, &mut event);
        }
        set
    };
    let address = agent.memory(BYTES, false);
    let Some((_, metadata)) = channel.receive() else { return };
    agent.load(&metadata);
    channel.send(address, &agent.metadata());
    let (mut delays, mut heard) = (Vec::new(), now());
    while now() - heard < PATIENCE {
        if !polls {
            let mut event = libc::epoll_event { events: 0, u64: 0 };
            // SAFETY: a location for one event. The time-out covers events from before the
            // descriptors were added.
            unsafe { libc::epoll_wait(set, &mut event, 1, 20) };
        }
        agent.look();
        let arrived = now();
        for sent in taken(&agent) {
            heard = arrived;
            if sent == END {
                delays.sort_unstable();
                let part =
                    |part: usize| delays.get(delays.len() * part / 100).map_or(0, |ns| ns / 1000);
                println!(
                    "{} notifications: p50 {} us, p90 {} us, p99 {} us",
                    delays.len(),
                    part(50),
                    part(90),
                    part(99)
                );
                return;
            }
            delays.push(arrived - sent);
        }
    }
    println!("no notification for {} s", PATIENCE / 1_000_000_000);
}

/// Returns the notifications that the last poll has found.
fn taken(agent: &NixlAgent) -> Vec<u64> {
    let (nixl, map, mut agents, mut sent) = (&agent.nixl, agent.notifications, 0, Vec::new());
    // SAFETY: live handles, locations for answers; the bytes live until the map is cleared.
    unsafe {
        done((nixl.nixl_capi_notif_map_size)(map, &mut agents));
        for at in 0..agents {
            let (mut name, mut count) = (null(), 0);
            done((nixl.nixl_capi_notif_map_get_agent_at)(map, at, &mut name));
            done((nixl.nixl_capi_notif_map_get_notifs_size)(map, name, &mut count));
            for index in 0..count {
                let (mut data, mut len) = (null(), 0);
                let status =
                    (nixl.nixl_capi_notif_map_get_notif)(map, name, index, &mut data, &mut len);
                if status == NIXL_CAPI_SUCCESS && len == 8 {
                    sent.push(data.cast::<u64>().read_unaligned());
                }
            }
        }
        if agents > 0 {
            done((nixl.nixl_capi_notif_map_clear)(map));
        }
    }
    sent
}

/// Runs the initiator: reads, and sends the notifications that the other thread requests.
pub(crate) fn read(channel: &Channel, slice: usize) {
    let agent = NixlAgent::start(c"initiator");
    let our_memory = agent.memory(BYTES, false);
    channel.send(0, &agent.metadata());
    let (their_memory, metadata) = channel.receive().expect("the target is alive");
    agent.load(&metadata);
    let blocks = BYTES / BLOCK;
    let places = shuffled(blocks, 1).into_iter().zip(shuffled(blocks, 2));
    let mut pieces = Vec::new();
    for (local, remote) in places {
        for at in (0..BLOCK).step_by(slice) {
            pieces.push([
                our_memory + local * BLOCK + at,
                their_memory + remote * BLOCK + at,
                slice.min(BLOCK - at),
            ]);
        }
    }
    let requests: Vec<_> = pieces.iter().map(|piece| agent.request(true, &[*piece])).collect();
    agent.transfer(requests[0]);
    let asked = AtomicU64::new(END);
    std::thread::scope(|scope| {
        let asks = scope.spawn(|| {
            for _ in 0..COUNT {
                std::thread::sleep(GAP);
                asked.store(now(), Ordering::Release);
            }
            std::thread::sleep(GAP);
        });
        let (mut moved, begun) = (0, now());
        for (request, piece) in requests.iter().zip(&pieces).cycle() {
            agent.transfer(*request);
            moved += piece[2];
            let sent = asked.swap(END, Ordering::AcqRel);
            if sent != END {
                say(&agent, sent);
            } else if asks.is_finished() {
                break;
            }
        }
        println!("slices of {slice}: {:.1} GB/s", moved as f64 / (now() - begun) as f64);
    });
    say(&agent, END);
    // Until the target has reported its results and closes its end.
    channel.receive();
}

fn say(agent: &NixlAgent, what: u64) {
    let (bytes, len) = (what.to_ne_bytes(), size_of::<u64>());
    // SAFETY: live handles, a C string, bytes with their length.
    done(unsafe {
        (agent.nixl.nixl_capi_gen_notif)(
            agent.raw,
            c"target".as_ptr(),
            bytes.as_ptr().cast(),
            len,
            agent.args,
        )
    });
}
