//! The roles that processes of a test play.

use std::io::{BufRead as _, Write as _};
use std::sync::Arc;

use super::sharing::{ProcessHandle, SHARED, map_anothers, owned, read, sum};
use super::{
    Bench, Maker, all_of, arrival, blocking, errors, filled, forgery, kernels, memory, settled,
    tickets, with_a_device,
};
use kvx_core::DeviceAccess as _;
use kvx_core::backend::IpcHandle;
use kvx_core::{DeviceId, ErrorKind};
use kvx_gpu::kernels::Swap;
use kvx_gpu::{BlockSelection, DevicePtr, StridedBlocks};
use kvx_testkit::{hex, unhex};

/// Plays a role; ends together with its parent, or when the parent requests it.
pub(crate) fn play(maker: &'static Maker, role: &str) {
    let words: Vec<_> = role.split(' ').collect();
    match words[..] {
        ["owner", visible] | ["owner", visible, "mapped"] => own(maker, visible, words.len() == 3),
        ["reader", visible] => reader(maker, visible),
        ["forger"] => with_a_device(maker, forgery::attack),
        ["release", release, version] => {
            set("KVX_STAND_IN", &format!("{release} {version}"));
            with_a_device(maker, memory::kinds);
            say("told apart");
        }
        ["mapping", release, version] => {
            set("KVX_STAND_IN", &format!("{release} {version}"));
            with_a_device(maker, map_anothers);
            say("mapped");
        }
        ["lender", ref backends @ ..] => {
            with_a_device(maker, |bench| blocking::lend(bench, backends));
        }
        ["named", release, version] => {
            set("KVX_STAND_IN", &format!("{release} {version}"));
            say(&with_a_device(maker, errors::text_of_an_error));
        }
        ["arrival", "unordered"] => {
            set("KVX_STAND_IN", "unordered-writes");
            with_a_device(maker, arrival::flushed);
            say("flushed");
        }
        ["arrival", _] => {
            with_a_device(maker, arrival::not_flushed);
            say("not flushed");
        }
        ["broken"] => {
            with_a_device(maker, errors::break_the_device);
            say("all tickets settled");
        }
        ["illegal"] => {
            with_a_device(maker, errors::reach_where_nothing_is);
            say("all tickets settled");
        }
        ["silent"] => {
            with_a_device(maker, errors::say_nothing);
            say("lost one copy");
        }
        ["fork"] => {
            with_a_device(maker, tickets::fork);
            say("the fork was told so");
        }
        ["compiled", ..] => {
            set("KVX_NVRTC_LIB", role.trim_start_matches("compiled "));
            with_a_device(maker, kernels::compiled_on_this_machine);
            say("compiled");
        }
        ["without-kernels"] => with_a_device(maker, without_kernels),
        ["unavailable", why] => unavailable(maker, why),
        _ => panic!("there is no role {role}"),
    }
}

pub(crate) fn say(line: &str) {
    println!("{line}");
    std::io::stdout().flush().expect("the parent listens");
}

pub(crate) fn hear() -> String {
    let mut line = String::new();
    std::io::stdin().lock().read_line(&mut line).expect("the parent speaks, or ends");
    line.trim_end().to_owned()
}

/// Sets a variable before anything else happens in this process.
fn set(variable: &str, value: &str) {
    // SAFETY: the process has one thread.
    unsafe { std::env::set_var(variable, value) };
}

/// Shares a part of a pool: ordinal, device, offset, handle.
fn own(maker: &'static Maker, visible: &str, mapped: bool) {
    set(maker.visible, visible);
    with_a_device(maker, |bench| {
        let pool = bench.device.pool(1 << 20);
        let pool = if mapped { pool.virtual_memory() } else { pool }.build().expect("a pool");
        pool.copy_in(0, &owned()).expect("a pool takes bytes");
        let pool = Arc::new(pool);
        let handle = bench.device.share(&pool).expect("a pool is shared");
        let about = bench.device.info();
        say(&format!(
            "{} {} {} {}",
            about.ordinal,
            hex(&about.id.0),
            handle.offset + SHARED.0 as u64,
            hex(&handle.bytes)
        ));
        hear();
        drop(pool);
    });
}

/// Prints ordinal and device, receives the handle to open, and prints what it has read.
fn reader(maker: &'static Maker, visible: &str) {
    set(maker.visible, visible);
    with_a_device(maker, |bench| {
        let about = bench.device.info();
        say(&format!("{} {}", about.ordinal, hex(&about.id.0)));
        let line = hear();
        let words: Vec<_> = line.split(' ').collect();
        let [owner, device, offset, handle] = words[..] else { panic!("the parent says {line}") };
        let owner = ProcessHandle::of(owner.parse().expect("a number"));
        let device = DeviceId(unhex(device).try_into().expect("16 bytes"));
        let handle = IpcHandle { bytes: unhex(handle), offset: offset.parse().expect("a number") };
        match read(bench, &owner, device, &handle) {
            Ok(bytes) => say(&format!("read {}", sum(&bytes))),
            Err(error) => say(&format!("{:?}: {error}", error.kind())),
        }
    });
}

fn without_kernels(bench: &Bench<'_>) {
    bench.control.command(&format!("fail {} 222 always", bench.maker.names.load));
    let bytes = super::pattern(11, 1 << 20);
    let (from, to) = (filled(&bench.device, &bytes), bench.device.pool(1 << 20).build().unwrap());
    let hops: Vec<_> = (0..100u64)
        .map(|at| kvx_core::backend::Hop {
            from: from.address() + at * 5000,
            to: to.address() + at * 5000 + at % 7,
            len: 1000,
        })
        .collect();
    // SAFETY: the memory outlives the waits, here and below.
    settled(|done| unsafe { bench.device.hop(&hops, done) }).unwrap();
    let copied = all_of(&to);
    for at in 0..100 {
        assert!(copied[at * 5000 + at % 7..][..1000] == bytes[at * 5000..][..1000]);
    }
    kernels::gather_scatter(bench, &[5, 1, 9, 2, 7, 3], 4096, 4000);
    let side = |base| StridedBlocks {
        base: DevicePtr(base),
        stride: 4096,
        selection: BlockSelection::First(3),
    };
    let (to, from) = (side(to.address()), side(from.address()));
    let swap = Swap::heads_to_tokens(2, 4, 64);
    // SAFETY: the memory outlives the wait.
    let error =
        settled(|done| unsafe { bench.device.permute(&to, &from, swap, done) }).unwrap_err();
    assert!([ErrorKind::Native, ErrorKind::Unavailable].contains(&error.kind()), "{error}");
    say("copied, not permuted");
}

/// Runs like a program that is built with `panic=abort`: any panic ends the process before it can
/// print anything.
fn unavailable(maker: &'static Maker, why: &str) {
    std::panic::set_hook(Box::new(|_| std::process::abort()));
    let folder = std::env::temp_dir().join(format!("kvx-second-driver-{}", std::process::id()));
    match why {
        "nowhere" => maker.variables.iter().for_each(|variable| set(variable, "/nowhere/lib.so.1")),
        "no-device" => set("KVX_STAND_IN", "devices 0"),
        "too-old" => set("KVX_STAND_IN", maker.too_old),
        "second-driver" => {
            // The dynamic linker takes another file for another library.
            let copy = folder.join("libcuda.so.1");
            std::fs::create_dir_all(&folder).expect("a folder for the copy");
            std::fs::copy(kvx_stand_in::library(), &copy).expect("a copy of the stand-in");
            kvx_backend::loader::preload(&copy).expect("the copy loads");
        }
        "other-library" => set(maker.variables[0], "libc.so.6"),
        _ => {}
    }
    let devices = (maker.devices)();
    std::fs::remove_dir_all(&folder).ok(); // kvx finds the copy by its path until now
    match devices {
        Ok(devices) => say(&format!("there are {} devices", devices.len())),
        Err(unavailable) => say(&unavailable.to_string()),
    }
}
