//! Tests memory of other processes, and the devices that a process sees. The other process runs
//! this program again.

use std::io::Write as _;
use std::time::Duration;

use kvx_testkit::{Child, hex, test, unhex};

use crate::cuda::{Cuda, Handle};
use crate::symbols::{Opened, call};

/// The environment variable with the role of a process: `owner` or `seer`.
const ROLE: &str = "KVX_STAND_IN_TEST_ROLE";

/// The time that the other process may take to answer.
const LIMIT: Duration = Duration::from_secs(10);

/// Plays the other process of a test and exits, if this process was started for that.
pub(crate) fn play_if_asked() {
    match std::env::var(ROLE).as_deref() {
        Err(_) => return,
        Ok("owner") => owner(),
        Ok("seer") => seer(),
        Ok(other) => panic!("there is no role {other}"),
    }
    std::process::exit(0);
}

/// Starts another process with this role and these variables.
fn start(role: &str, variables: &[(&str, &str)]) -> Child {
    let mut variables: Vec<_> =
        variables.iter().map(|(name, value)| (*name, (*value).to_owned())).collect();
    variables.push((ROLE, role.to_owned()));
    Child::start_self_with(&variables).expect("this program can be started")
}

fn answer(other: &Child) -> String {
    other.hear(LIMIT).expect("it answers")
}

/// Answers the parent process.
fn say(line: &str) {
    println!("{line}");
    std::io::stdout().flush().expect("the parent reads standard output");
}

fn next_line() -> Option<String> {
    let mut line = String::new();
    let read = std::io::stdin().read_line(&mut line).expect("standard input is readable");
    (read > 0).then(|| line.trim_end().to_owned())
}

/// Shares memory, returns its content, and frees it.
fn owner() {
    let cuda = Cuda::new();
    let memory = cuda.with(b"kvx kvx ");
    let mut handle = [0_u8; 64];
    assert_eq!(
        call!(cuda.library, cuIpcGetMemHandle(handle.as_mut_ptr() => *mut u8, memory => u64)),
        0
    );
    let mut opened = 0_u64;
    let bytes: [u64; 8] =
        std::array::from_fn(|at| u64::from_le_bytes(handle[at * 8..][..8].try_into().expect("8")));
    let own = call!(cuda.library, cuIpcOpenMemHandle_v2(&mut opened => *mut u64, bytes => [u64; 8], 1 => u32));
    assert_eq!(own, 201, "memory of this process cannot be opened");
    say(&hex(&handle));
    while let Some(line) = next_line() {
        match line.as_str() {
            "show" => say(&hex(&cuda.download(memory, 8))),
            "free" => say(&cuda.free(memory).to_string()),
            _ => break,
        }
    }
}

/// A handle that is passed by value: 64 bytes in memory, like the driver's struct.
#[derive(Clone, Copy)]
#[repr(C)]
struct ByValue([u8; 64]);

fn open(cuda: &Cuda, handle: &[u8]) -> Result<u64, i32> {
    let handle = ByValue(handle.try_into().expect("64 bytes"));
    let mut address = 0_u64;
    match call!(cuda.library, cuIpcOpenMemHandle_v2(&mut address => *mut u64, handle => ByValue, 1 => u32))
    {
        0 => Ok(address),
        code => Err(code),
    }
}

fn close(cuda: &Cuda, address: u64) -> i32 {
    call!(cuda.library, cuIpcCloseMemHandle(address => u64))
}

#[test]
fn memory_of_another_process_is_the_same_memory() {
    let cuda = Cuda::new();
    let mut owner = start("owner", &[]);
    let handle = unhex(&answer(&owner));
    let memory = open(&cuda, &handle).expect("the memory is shared");
    assert_eq!(cuda.download(memory, 8), b"kvx kvx ");
    assert_eq!(cuda.upload(memory, b"seen"), 0);
    owner.say("show").expect("the owner reads lines");
    assert_eq!(unhex(&answer(&owner)), b"seenkvx ");
    assert_eq!(open(&cuda, &handle), Err(208), "opened twice");
    assert_eq!(cuda.free(memory), 1, "opened memory cannot be freed");
    assert_eq!(close(&cuda, memory), 0);
    assert_eq!(close(&cuda, memory), 1);
    let memory = open(&cuda, &handle).expect("the memory is still shared");
    assert_eq!(close(&cuda, memory), 0);
    owner.say("free").expect("the owner reads lines");
    assert_eq!(answer(&owner), "0");
    assert_eq!(open(&cuda, &handle), Err(1), "freed");
}

#[test]
fn memory_of_a_dead_process_does_not_open() {
    let cuda = Cuda::new();
    let owner = start("owner", &[]);
    let handle = unhex(&answer(&owner));
    let memory = open(&cuda, &handle).expect("the memory is shared");
    assert_eq!(close(&cuda, memory), 0);
    drop(owner);
    assert_eq!(open(&cuda, &handle), Err(1));
    assert_eq!(open(&cuda, &[7; 64]), Err(1), "the handle is invalid");
}

/// Reports the devices that it sees.
fn seer() {
    let library = Opened::by_path();
    if call!(library, cuInit(0 => u32)) != 0 {
        say("none");
        return;
    }
    let mut count = 0;
    assert_eq!(call!(library, cuDeviceGetCount(&mut count => *mut i32)), 0);
    let uuid = |ordinal: i32| {
        let mut uuid = [0_u8; 16];
        assert_eq!(
            call!(library, cuDeviceGetUuid_v2(uuid.as_mut_ptr() => *mut u8, ordinal => i32)),
            0
        );
        let mut bus = [0_u8; 32];
        assert_eq!(
            call!(library, cuDeviceGetPCIBusId(bus.as_mut_ptr() => *mut u8, 32 => i32, ordinal => i32)),
            0
        );
        let mut context: Handle = 0;
        assert_eq!(
            call!(library, cuDevicePrimaryCtxRetain(&mut context => *mut Handle, ordinal => i32)),
            0
        );
        format!("{}@{}", uuid[15], String::from_utf8_lossy(&bus[..12]))
    };
    say(&(0..count).map(uuid).collect::<Vec<_>>().join(" "));
}

#[test]
fn a_process_sees_only_its_configured_devices() {
    let three = ("KVX_STAND_IN", "devices 3");
    for (variables, seen) in [
        (&[three][..], "0@0000:01:00.0 1@0000:02:00.0 2@0000:03:00.0"),
        (&[three, ("CUDA_VISIBLE_DEVICES", "2")], "2@0000:03:00.0"),
        (&[three, ("CUDA_VISIBLE_DEVICES", "1,0")], "1@0000:02:00.0 0@0000:01:00.0"),
        (&[three, ("CUDA_VISIBLE_DEVICES", "1,7,0")], "1@0000:02:00.0"),
        (
            &[three, ("CUDA_VISIBLE_DEVICES", "GPU-6b76782d-7374-616e-642d-696e2d637501")],
            "1@0000:02:00.0",
        ),
        (&[three, ("CUDA_VISIBLE_DEVICES", "")], "none"),
        (&[("KVX_STAND_IN", "devices 0")], "none"),
        (&[("KVX_STAND_IN", "fail cuInit 803 always")], "none"),
    ] {
        assert_eq!(answer(&start("seer", variables)), seen, "{variables:?}");
    }
}
