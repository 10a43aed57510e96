//! Tests of SHM between processes that stop, die, restart, or may not access each other.

use std::time::{Duration, Instant};

use crate::ends::child::{self, Other};
use crate::ends::*;
use kvx_backend::control::ControlMessage;
use kvx_core::{Agent, ErrorKind, Region};
use kvx_testkit::{skip, test};

const BLOCKS: u32 = 4096;
/// The variable with a child's role: a name, and flags that make the child differ from its parent.
const ROLE: &str = "KVX_SHM_TEST_ROLE";

/// Starts a child with this role.
fn start(role: &str) -> Other {
    Other::start(ROLE, role)
}

/// Plays a role and ends the process, if it was started for that.
pub(crate) fn play_if_asked() {
    if let Some((role, line)) = child::role(ROLE) {
        play(&role, line);
        std::process::exit(0);
    }
}

/// Owns two regions and answers requests, or reads those of its parent.
fn play(role: &str, mut line: child::Line) {
    for word in role.split(' ').skip(1) {
        match word {
            "without-ptrace" => drop_ptrace(),
            // SAFETY: no pointers are passed.
            "undumpable" => assert_eq!(unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 0) }, 0),
            // SAFETY: `setresuid` takes numbers only.
            "nobody" => assert_eq!(unsafe { libc::setresuid(65534, 65534, 65534) }, 0),
            "crowded" => return be_crowded(&mut line),
            other => panic!("unknown flag: {other}"),
        }
    }
    let own = agent(role.split(' ').next().unwrap());
    let regions = BOTH.map(|on| region(&own, &format!("{on:?}"), on, BLOCKS, 2));
    line.say(&own.metadata().unwrap());
    let mut readers = Vec::new();
    while let Some(question) = line.hear() {
        let text = String::from_utf8_lossy(&question).into_owned();
        let words: Vec<&str> = text.split(' ').collect();
        match words[0] {
            "block" => {
                let region = &regions[words[1].parse::<usize>().unwrap()];
                line.say(filled_with(region, words[2].parse().unwrap()).to_string().as_bytes());
            }
            // The first thread of the process ends, and the others serve the peers.
            // SAFETY: ends this thread; no code of it follows.
            "linger" => unsafe { _ = libc::syscall(libc::SYS_exit, 0) },
            "quit" => {
                shut_down(&[&own]);
                line.say(b"done");
            }
            // Connects to the parent, whose metadata follows.
            "connect" => {
                let metadata = line.hear().unwrap();
                readers.push(own.connect(&metadata).unwrap());
                line.say(b"connected");
            }
            operation => {
                let peer = readers.last().unwrap();
                let theirs = peer.region(words[1]).unwrap();
                let ours = &regions[words[2].parse::<usize>().unwrap()];
                let plan = match operation {
                    "read" => read(ours, &theirs, &[0], &[1]),
                    _ => write(ours, &theirs, &[0], &[1]),
                };
                let answer = match run(peer, &plan) {
                    Ok(_) => "ok".to_owned(),
                    Err(error) => format!("{:?} {error}", error.kind()),
                };
                line.say(answer.as_bytes());
            }
        }
    }
}

fn drop_ptrace() {
    use rustix::thread::{CapabilitySet, capabilities, set_capabilities};
    let mut sets = capabilities(None).unwrap();
    for set in [&mut sets.effective, &mut sets.permitted, &mut sets.inheritable] {
        set.remove(CapabilitySet::SYS_PTRACE);
    }
    set_capabilities(None, sets).unwrap();
}

fn may_ptrace() -> bool {
    let sets = rustix::thread::capabilities(None).unwrap();
    sets.effective.contains(rustix::thread::CapabilitySet::SYS_PTRACE)
}

struct Scene {
    own: Agent,
    local: Region,
    other: Other,
    peer: kvx_core::Peer,
}

fn scene(name: &str, on: On) -> Scene {
    let own = agent("parent");
    let local = region(&own, "local", on, BLOCKS, 1);
    let mut other = start(name);
    let peer = own.connect(other.hear()).unwrap();
    peer.ready(CUT_OFF).wait_blocking(CUT_OFF).unwrap();
    Scene { own, local, other, peer }
}

fn all() -> Vec<u32> {
    (0..BLOCKS).map(|at| (at * 2731 + 7) % BLOCKS).collect()
}

#[test]
fn blocks_are_read_and_written_between_processes() {
    for ours in BOTH {
        let Scene { own, local, mut other, peer } = scene("travel", ours);
        for (number, theirs) in BOTH.iter().enumerate() {
            let there = peer.region(&format!("{theirs:?}")).unwrap();
            let (from, into) = (all(), (0..BLOCKS).collect::<Vec<_>>());
            run(&peer, &read(&local, &there, &into, &from)).unwrap();
            for (into, from) in into.iter().zip(&from) {
                assert_eq!(filled_with(&local, *into), pattern(2, *from));
            }
            local.copy_in(5 * BLOCK as usize, &[0xee; BLOCK as usize]).unwrap();
            run(&peer, &write(&local, &there, &[5], &[9])).unwrap();
            assert_eq!(other.ask(&format!("block {number} 9")), 0xee.to_string());
        }
        other.ask("quit");
        shut_down(&[&own]);
    }
}

#[test]
fn a_peer_killed_in_mid_transfer_is_lost_and_what_succeeded_is_right() {
    for on in BOTH {
        let Scene { own, local, mut other, peer } = scene("killed", on);
        let there = peer.region("Foreign").unwrap();
        let reading = read(&local, &there, &all(), &all());
        let writing = write(&local, &there, &all(), &all());
        run(&peer, &reading).unwrap();
        let transfers: Vec<_> = (0..40)
            .map(|at| peer.post(if at % 2 == 0 { &reading } else { &writing }).unwrap())
            .collect();
        other.kill();
        let killed = Instant::now();
        let settled: Vec<_> = transfers.iter().map(|transfer| transfer.settled()).collect();
        for transfer in transfers {
            if let Err(error) = transfer.wait_blocking(CUT_OFF) {
                assert_eq!(error.kind(), ErrorKind::PeerLost, "{error}");
                assert!(!error.to_string().contains("shut down"), "it was killed: {error}");
            }
        }
        for settled in settled {
            settled.wait_blocking(CUT_OFF).unwrap();
        }
        assert!(killed.elapsed() < CUT_OFF);
        assert_eq!(run(&peer, &reading).unwrap_err().kind(), ErrorKind::PeerLost);
        // Reads and writes carried the same bytes, so each block holds them regardless of which
        // completed.
        for block in 0..BLOCKS {
            assert_eq!(filled_with(&local, block), pattern(2, block));
        }
        shut_down(&[&own]);
    }
}

#[test]
fn a_stopped_peer_is_still_read_and_its_writes_wait() {
    for on in BOTH {
        let own = Agent::builder("patient")
            .peer_timeout(Duration::from_secs(30))
            .registry(registry())
            .build()
            .unwrap();
        let local = region(&own, "local", on, BLOCKS, 1);
        let mut other = start("stopped");
        let peer = own.connect(other.hear()).unwrap();
        let there = peer.region(&format!("{on:?}")).unwrap();
        let reading = read(&local, &there, &[0], &[7]);
        let writing = write(&local, &there, &[1], &[8]);
        run(&peer, &reading).unwrap();
        run(&peer, &writing).unwrap();
        other.stop();
        local.copy_in(0, &[0; BLOCK as usize]).unwrap();
        run(&peer, &reading).unwrap();
        assert_eq!(filled_with(&local, 0), pattern(2, 7));
        let late = peer.transfer(&writing).deadline(Duration::from_millis(100)).post().unwrap();
        let settled = late.settled();
        assert_eq!(late.wait_blocking(CUT_OFF).unwrap_err().kind(), ErrorKind::TimedOut);
        other.go_on();
        settled.wait_blocking(CUT_OFF).unwrap();
        run(&peer, &writing).unwrap();
        other.ask("quit");
        shut_down(&[&own]);
    }
}

#[test]
fn a_silent_peer_is_lost_but_its_writes_settle_only_when_it_releases_the_memory() {
    let Scene { own, local, other, peer } = scene("silent", On::Foreign);
    let there = peer.region("Foreign").unwrap();
    let writing = write(&local, &there, &all(), &all());
    run(&peer, &writing).unwrap();
    other.stop();
    let transfer = peer.transfer(&writing).deadline(CUT_OFF).post().unwrap();
    let settled = transfer.settled();
    assert_eq!(transfer.wait_blocking(CUT_OFF).unwrap_err().kind(), ErrorKind::PeerLost);
    // The peer is stopped, not dead: it could still read the source of the write.
    let revoked = local.revoke(Duration::from_millis(100)).wait_blocking(CUT_OFF);
    assert_eq!(revoked.unwrap_err().kind(), ErrorKind::StillShared);
    other.go_on();
    settled.wait_blocking(CUT_OFF).unwrap();
    local.revoke(CUT_OFF).wait_blocking(CUT_OFF).unwrap();
    shut_down(&[&own]);
}

/// The kernel then reports the process itself as exiting.
#[test]
fn a_peer_whose_first_thread_alone_has_ended_is_not_lost() {
    let timeout = Duration::from_secs(60);
    let own = Agent::builder("own").peer_timeout(timeout).registry(registry()).build().unwrap();
    let local = region(&own, "local", On::Pool, BLOCKS, 1);
    let mut other = start("lingering");
    let peer = own.connect(other.hear()).unwrap();
    let writing = write(&local, &peer.region("Pool").unwrap(), &[1], &[8]);
    run(&peer, &writing).unwrap();
    other.say(b"linger");
    until_threads_are(&other, "Z", 1); // the one that was the first
    other.signal(libc::SIGSTOP);
    until_threads_are(&other, "TZ", usize::MAX);
    let transfer = peer.transfer(&writing).deadline(timeout).post().unwrap();
    // Longer than the second after which a silent peer is checked.
    let early = transfer.settled().wait_blocking(Duration::from_secs(3));
    assert_eq!(early.unwrap_err().kind(), ErrorKind::TimedOut, "the peer is stopped");
    other.signal(libc::SIGCONT);
    transfer.wait_blocking(CUT_OFF).unwrap();
    shut_down(&[&own]);
}

/// Waits until the states of at least `count` threads of a child, or of all, are among these.
fn until_threads_are(child: &Other, states: &str, count: usize) {
    let begun = Instant::now();
    loop {
        let threads: Vec<_> =
            std::fs::read_dir(format!("/proc/{}/task", child.pid())).unwrap().collect();
        let is = |thread: &std::io::Result<std::fs::DirEntry>| {
            let stat = std::fs::read_to_string(thread.as_ref().unwrap().path().join("stat"));
            let stat = stat.unwrap_or_default();
            let state = stat.rsplit(')').next().and_then(|rest| rest.trim_start().chars().next());
            state.is_some_and(|state| states.contains(state))
        };
        if threads.iter().filter(|thread| is(thread)).count() >= count.min(threads.len()) {
            return;
        }
        assert!(begun.elapsed() < CUT_OFF, "the child's threads do not reach {states}");
        std::thread::yield_now();
    }
}

#[test]
fn a_restarted_peer_is_recognised() {
    let Scene { own, local, mut other, peer } = scene("restarted", On::Pool);
    let reading = read(&local, &peer.region("Pool").unwrap(), &[0], &[7]);
    run(&peer, &reading).unwrap();
    other.kill();
    // Once the peer's end is known, the reader asks for its successor.
    until_lost(&peer);
    let mut again = start("restarted");
    let metadata = again.hear();
    assert_eq!(run(&peer, &reading).unwrap_err().kind(), ErrorKind::PeerRestarted);
    let peer = own.connect(&metadata).unwrap();
    let reading = read(&local, &peer.region("Pool").unwrap(), &[0], &[7]);
    run(&peer, &reading).unwrap();
    again.ask("quit");
    shut_down(&[&own]);
}

#[test]
fn a_stopped_reader_holds_a_region_until_it_releases_it_or_dies() {
    for on in BOTH {
        for dies in [false, true] {
            let own = agent("lender");
            let lent = region(&own, "lent", on, BLOCKS, 5);
            let mut other = start("holder");
            other.hear();
            other.say(b"connect");
            other.say(&own.metadata().unwrap());
            assert_eq!(other.hear(), b"connected");
            assert_eq!(other.ask("read lent 1"), "ok");
            other.stop();
            let refused =
                lent.revoke(Duration::from_millis(100)).wait_blocking(CUT_OFF).unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::StillShared);
            if dies {
                other.kill()
            } else {
                other.go_on()
            }
            lent.revoke(CUT_OFF).wait_blocking(CUT_OFF).unwrap();
            if !dies {
                let answer = other.ask("read lent 1");
                assert!(answer.starts_with("Revoked"), "{answer}");
            }
            shut_down(&[&own]);
        }
    }
}

/// As root, a child without CAP_SYS_PTRACE may not access this process; as any other user, this
/// process may not access a child that is not dumpable.
#[test]
fn memory_that_the_kernel_refuses_to_read_is_unsupported_and_pools_still_move() {
    let own = agent("parent");
    let regions = BOTH.map(|on| region(&own, &format!("{on:?}"), on, BLOCKS, 1));
    let told = |refused: &str| {
        assert!(refused.starts_with("Unsupported"), "{refused}");
        assert!(refused.contains("process_vm_readv is refused"), "{refused}");
    };
    if may_ptrace() {
        let mut other = start("blind without-ptrace");
        let metadata = other.hear();
        other.say(b"connect");
        other.say(&own.metadata().unwrap());
        assert_eq!(other.hear(), b"connected");
        assert_eq!(other.ask("read Pool 0"), "ok");
        assert_eq!(other.ask("read Pool 1"), "ok");
        told(&other.ask("read Foreign 0"));
        // This process may access the child, so that the child can write from any memory and be
        // read.
        for number in [0, 1] {
            assert_eq!(other.ask(&format!("write Pool {number}")), "ok");
            assert_eq!(other.ask(&format!("write Foreign {number}")), "ok");
        }
        // The child pulls this end's writes, from pools only.
        let peer = own.connect(&metadata).unwrap();
        let there = peer.region("Foreign").unwrap();
        run(&peer, &write(&regions[0], &there, &[0], &[1])).unwrap();
        let refused = run(&peer, &write(&regions[1], &there, &[0], &[1])).unwrap_err();
        told(&format!("{:?} {refused}", refused.kind()));
        assert!(peer.route().to_string().contains("no writes of other memory"), "{}", peer.route());
        run(&peer, &read(&regions[1], &there, &[0], &[1])).unwrap();
        other.ask("quit");
    } else {
        let mut other = start("opaque undumpable");
        let peer = own.connect(other.hear()).unwrap();
        run(&peer, &read(&regions[1], &peer.region("Pool").unwrap(), &[0], &[1])).unwrap();
        let refused = run(&peer, &read(&regions[1], &peer.region("Foreign").unwrap(), &[0], &[1]))
            .unwrap_err();
        told(&format!("{:?} {refused}", refused.kind()));
        other.ask("quit");
    }
    shut_down(&[&own]);
}

#[test]
fn a_process_of_another_user_is_rejected() {
    if !rustix::process::geteuid().is_root() {
        const TITLE: &str = "a_process_of_another_user_is_rejected";
        return skip(TITLE, "only root becomes another user", "run the tests as root");
    }
    let own = agent("parent");
    let _region = region(&own, "kv", On::Pool, 4, 1);
    let mut other = start("stranger nobody");
    let metadata = other.hear();
    let peer = own.connect(&metadata).unwrap();
    let refused = peer.ready(CUT_OFF).wait_blocking(CUT_OFF).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Authentication, "{refused}");
    other.say(b"connect");
    other.say(&own.metadata().unwrap());
    assert_eq!(other.hear(), b"connected");
    let answer = other.ask("read kv 0");
    assert!(answer.starts_with("Authentication"), "{answer}");
    other.ask("quit");
    shut_down(&[&own]);
}

/// Runs as an unprivileged user: readers take no answers until the kernel takes no more files of
/// this user. Reports the CPU time of one second of that, and whether everything arrives in the
/// end.
fn be_crowded(line: &mut child::Line) {
    const FILES: u64 = 128;
    let limit = rustix::process::Rlimit { current: Some(FILES), maximum: Some(FILES) };
    rustix::process::setrlimit(rustix::process::Resource::Nofile, limit).unwrap();
    let own = agent("crowded");
    let regions: Vec<Region> =
        (0..40).map(|number| region(&own, &format!("pool {number}"), On::Pool, 1, 2)).collect();
    let metadata = kvx_core::backend::Metadata::decode(&own.metadata().unwrap()).unwrap();
    let readers: Vec<_> = (0..6).map(|_| raw::Reader::greeted(&metadata)).collect();
    for reader in &readers {
        for (import, region) in (0..).zip(&metadata.regions) {
            reader.say(&ControlMessage::Want { import, id: region.id, key: region.key });
        }
    }
    let cpu = || {
        let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
        let fields: Vec<u64> = stat
            .rsplit(')')
            .next()
            .unwrap()
            .split_whitespace()
            .skip(11)
            .take(2)
            .map(|it| it.parse().unwrap())
            .collect();
        Duration::from_millis(10 * (fields[0] + fields[1]))
    };
    std::thread::sleep(Duration::from_millis(200));
    let before = cpu();
    std::thread::sleep(Duration::from_secs(1));
    let spent = cpu() - before;
    let all = readers.iter().map(raw::Reader::grants).collect::<Vec<_>>();
    line.say(
        format!("{} ms, {all:?} of {} with files", spent.as_millis(), regions.len()).as_bytes(),
    );
}

#[test]
fn an_owner_whose_readers_take_no_files_sleeps_and_loses_nothing() {
    if !rustix::process::geteuid().is_root() {
        const TITLE: &str = "an_owner_whose_readers_take_no_files_sleeps_and_loses_nothing";
        return skip(TITLE, "only root becomes another user", "run the tests as root");
    }
    let told = String::from_utf8(start("owner nobody crowded").hear()).unwrap();
    let spent: u64 = told.split(' ').next().unwrap().parse().unwrap();
    assert!(told.contains("[40, 40, 40, 40, 40, 40] of 40"), "{told}");
    assert!(spent < 60, "{told}");
}

/// A reader that uses the protocol directly.
mod raw {
    use std::mem::MaybeUninit;
    use std::os::fd::OwnedFd;
    use std::time::{Duration, Instant};

    use kvx_backend::control::proof::Keys;
    use kvx_backend::control::{ControlMessage, Greeting, VERSIONS};
    use kvx_core::backend::Metadata;
    use kvx_core::{Identity, Incarnation};
    use rustix::net::{
        AddressFamily, RecvAncillaryBuffer, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags,
        SocketType,
    };

    pub(super) struct Reader(OwnedFd);

    impl Reader {
        /// Connects and completes the handshake.
        pub(super) fn greeted(metadata: &Metadata) -> Self {
            let address = &metadata.backends[0].1;
            let at = address.windows(8).position(|window| window == b"kvx-shm-").unwrap();
            let flags = SocketFlags::CLOEXEC;
            let socket =
                rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
                    .unwrap();
            let name = SocketAddrUnix::new_abstract_name(&address[at..at + 40]).unwrap();
            rustix::net::connect(&socket, &name).unwrap();
            let reader = Reader(socket);
            let me = Identity { name: "reader".into(), incarnation: Incarnation([9; 16]) };
            let keys = Keys::new(&metadata.invited.unwrap().by, None);
            let (greeting, body) = Greeting::new(&me, keys, &[0; 40]).unwrap();
            reader.say(&ControlMessage::Hello { versions: VERSIONS, body: &body });
            let (welcome, _) = reader.hear(Duration::from_secs(5)).unwrap();
            let Ok(ControlMessage::Welcome { version, body }) = ControlMessage::decode(&welcome)
            else {
                panic!("{welcome:?}")
            };
            let (_, proof) = greeting.verify_welcome(version, body).unwrap();
            reader.say(&ControlMessage::Confirm { proof });
            reader
        }

        pub(super) fn say(&self, message: &ControlMessage<'_>) {
            rustix::net::send(&self.0, &message.encode(), SendFlags::NOSIGNAL).unwrap();
        }

        /// Receives a message, and whether it came with a file; the file is closed.
        fn hear(&self, within: Duration) -> Option<(Vec<u8>, bool)> {
            let until = Instant::now() + within;
            let mut buffer = vec![0; 1 << 16];
            loop {
                let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
                let mut control = RecvAncillaryBuffer::new(&mut space);
                let mut parts = [std::io::IoSliceMut::new(&mut buffer)];
                match rustix::net::recvmsg(&self.0, &mut parts, &mut control, RecvFlags::DONTWAIT) {
                    Ok(got) => {
                        let file = control.drain().count() > 0;
                        return Some((buffer[..got.bytes].to_vec(), file));
                    }
                    Err(rustix::io::Errno::AGAIN) if Instant::now() < until => {
                        std::thread::yield_now()
                    }
                    Err(_) => return None,
                }
            }
        }

        /// Returns the number of regions granted to it with their files.
        pub(super) fn grants(&self) -> usize {
            let heard = std::iter::from_fn(|| self.hear(Duration::from_secs(1)));
            heard
                .filter(|(message, file)| {
                    *file
                        && matches!(
                            ControlMessage::decode(message),
                            Ok(ControlMessage::Grant { .. })
                        )
                })
                .count()
        }
    }
}
