//! Ranks whose pools lie on devices, each in its own process.

use std::ffi::OsString;
use std::path::Path;
use std::time::Instant;

use kvx_connector::{ConnectorBuilder, Released};
use kvx_testkit::Child;
use kvx_vllm::config::{KvTransferConfig, Surroundings};
use kvx_vllm::engine::{Arrival, Ending, Status};
use kvx_vllm::params::TransferParams;

use super::fleet::{Fleet, extra, rank, spec};
use super::loads::prompts_arrive;
use super::rank::VARIABLE;
use crate::runtime::rig::{BLOCK, BLOCKS, CUDA, LIMIT, POOL, built, lists};

/// `cargo xtask gpu` selects these tests by the prefix of their names.
pub(crate) const CASES: &[(&str, fn(&str))] = &[
    ("on_devices_two_ranks_are_read_by_one", on_devices_two_ranks_are_read_by_one),
    ("on_devices_one_rank_is_read_by_two", on_devices_one_rank_is_read_by_two),
    ("on_devices_ranks_are_read_into_host_memory", on_devices_ranks_are_read_into_host_memory),
    ("on_devices_ranks_read_from_host_memory", on_devices_ranks_read_from_host_memory),
    ("on_devices_ranks_write_and_are_written_to", on_devices_ranks_write_and_are_written_to),
];

/// Tests of SHM and TCP, alone and together.
pub(crate) const OF_SHM: &[(&str, fn(&str))] = &[
    (
        "on_devices_shm_alone_reads_none_into_the_host",
        on_devices_shm_alone_reads_none_into_the_host,
    ),
    (
        "on_devices_bytes_go_through_buffers_of_the_host",
        on_devices_bytes_go_through_buffers_of_the_host,
    ),
    ("on_devices_peers_see_copies_on_the_host", on_devices_peers_see_copies_on_the_host),
    ("on_devices_chunks_are_copied_before_the_end", on_devices_chunks_are_copied_before_the_end),
    (
        "on_devices_blocks_that_a_lost_rank_copied_are_not_published",
        on_devices_blocks_that_a_lost_rank_copied_are_not_published,
    ),
];

/// The function that opens memory of another process.
const OPEN: &str = "cuIpcOpenMemHandle_v2";
/// The function that allocates host memory which the device can access.
const BUFFER: &str = "cuMemHostAlloc";

/// Both backends.
const BOTH: &str = r#"{"backends": ["SHM", "TCP"], "kv_lease_duration": 5}"#;

/// Returns the path of the driver that ranks use.
fn driver() -> OsString {
    std::env::var_os("KVX_CUDA_LIB").unwrap_or_else(|| kvx_stand_in::library().into())
}

fn is_stand_in() -> bool {
    Path::new(&driver()).file_name() == kvx_stand_in::library().file_name()
}

/// Starts the process of a rank whose pool lies on the first device.
fn rank_on_device(path: &Path, at: u32, tp: u32) -> Child {
    let driver = driver().into_string().unwrap();
    let variables =
        [(VARIABLE, spec(path, at, tp, BLOCKS)), (POOL, CUDA.to_owned()), ("KVX_CUDA_LIB", driver)];
    Child::start_self_with(&variables).unwrap()
}

/// Builds an engine whose pools may lie on devices, with this `kv_buffer_device`.
fn builder(connector: &str, engine: &str, extra: &str, buffer: &str) -> ConnectorBuilder {
    let json = format!(
        r#"{{"kv_connector": "{connector}", "kv_role": "kv_both", "engine_id": "{engine}",
             "kv_buffer_device": "{buffer}", "kv_connector_extra_config": {extra}}}"#
    );
    let surroundings = Surroundings::default().variable("VLLM_NIXL_SIDE_CHANNEL_HOST", "127.0.0.1");
    built(&KvTransferConfig::from_json(&json, &surroundings.gpu(true)).unwrap())
}

/// An engine: its name, its number of ranks, and how they are started.
type Side = (&'static str, u32, fn(&Path, u32, u32) -> Child);

const fn on_device(engine: &'static str, tp: u32) -> Side {
    (engine, tp, rank_on_device)
}

const fn in_host_memory(engine: &'static str, tp: u32) -> Side {
    (engine, tp, rank)
}

fn fleet((engine, tp, start): Side, extra: &str, buffer: &str) -> Fleet {
    Fleet::of_ranks(builder("NixlConnector", engine, extra, buffer), engine, tp, start)
}

fn read_by(backend: &str, prefill: Side, decode: Side) {
    let fleet = |side| fleet(side, &extra(backend), CUDA);
    prompts_arrive(fleet(prefill), fleet(decode));
}

// vLLM 8, 15, 21: one decode rank reads from two prefill ranks, with pools on devices and ranks in
//     separate processes
fn on_devices_two_ranks_are_read_by_one(backend: &str) {
    read_by(backend, on_device("prefill", 2), on_device("decode", 1));
}

// vLLM 8, 15, 21: two decode ranks read from one prefill rank, with pools on devices and ranks in
//     separate processes
fn on_devices_one_rank_is_read_by_two(backend: &str) {
    read_by(backend, on_device("prefill", 1), on_device("decode", 2));
}

/// A rank without a pool on a device opens no device, so these reads go over TCP.
// vLLM 21: ranks read from pools on devices into host memory, which SHM leaves to TCP
fn on_devices_ranks_are_read_into_host_memory(backend: &str) {
    let extra = if backend == "SHM" { BOTH.to_owned() } else { extra(backend) };
    for (from, to) in [(2, 1), (1, 2)] {
        let fleet = |side| fleet(side, &extra, CUDA);
        prompts_arrive(fleet(on_device("prefill", from)), fleet(in_host_memory("decode", to)));
    }
}

// vLLM 21: ranks read from host memory into pools on devices
fn on_devices_ranks_read_from_host_memory(backend: &str) {
    for (from, to) in [(2, 1), (1, 2)] {
        read_by(backend, in_host_memory("prefill", from), on_device("decode", to));
    }
}

// vLLM 21, 47: ranks push blocks between pools on devices
fn on_devices_ranks_write_and_are_written_to(backend: &str) {
    let fleet = |(engine, tp, start): Side| {
        let builder = builder("NixlPushConnector", engine, &extra(backend), CUDA);
        Fleet::of_ranks(builder, engine, tp, start)
    };
    prompts_arrive(fleet(on_device("prefill", 2)), fleet(on_device("decode", 1)));
}

/// SHM alone refuses it, and says why.
fn on_devices_shm_alone_reads_none_into_the_host(backend: &str) {
    let fleet = |side| fleet(side, &extra(backend), CUDA);
    let (mut prefill, decode) =
        (fleet(on_device("prefill", 1)), fleet(in_host_memory("decode", 1)));
    prefill.compute(1, &[5], BLOCK);
    let (_lease, params) = prefill.publish("p", &[5], BLOCK).unwrap();
    let error = decode.fetch("d", &params, &[1], LIMIT).join().unwrap_err();
    assert!(error.to_string().contains("use TCP"), "{error}");
    prefill.end();
    decode.end();
}

/// Lets one rank read from two. Returns how often their processes called these functions of the
/// stand-in.
fn calls_of_a_load(extra: &str, buffer: &str) -> [u64; 2] {
    let fleet = |side| fleet(side, extra, buffer);
    let (mut prefill, mut decode) = (fleet(on_device("prefill", 2)), fleet(on_device("decode", 1)));
    // The second time the blocks have other contents.
    for round in 1..=2 {
        prefill.compute(round, &[5, 6, 8], 3 * BLOCK);
        let (lease, params) = prefill.publish(&format!("p{round}"), &[5, 6, 8], 3 * BLOCK).unwrap();
        decode.fetch(&format!("d{round}"), &params, &[1, 2, 3], LIMIT).join().unwrap();
        assert_eq!(decode.wrong(round, &[1, 2, 3], 0..3 * BLOCK), 0, "{buffer}");
        assert_eq!(lease.wait_blocking(LIMIT).unwrap(), Released::Fetched);
    }
    let mut called = |function| {
        let counts =
            [&mut prefill, &mut decode].map(|fleet| fleet.ask(&format!("calls {function}")));
        counts.iter().flatten().map(|count| count.parse::<u64>().unwrap()).sum()
    };
    let calls = if is_stand_in() { [OPEN, BUFFER].map(&mut called) } else { [0, 0] };
    prefill.end();
    decode.end();
    calls
}

/// SHM comes first, and would move bytes from device to device. TCP has buffers, and SHM uses host
/// copies.
// vLLM 45: with TCP alone no host copy is kept: bytes pass through TCP's buffers as they move
fn on_devices_bytes_go_through_buffers_of_the_host(_: &str) {
    let [opened, _] = calls_of_a_load(BOTH, CUDA);
    let ways = [extra("TCP"), BOTH.to_owned()].map(|extra| calls_of_a_load(&extra, "cpu"));
    if is_stand_in() {
        assert!(opened > 0, "no rank has opened another's memory");
        for [opened, buffers] in ways {
            assert!(opened == 0 && buffers >= 3, "{opened} times opened, {buffers} buffers");
        }
    }
}

/// Starts an engine whose ranks have host copies, if they lie on devices.
fn copied(connector: &str, (engine, tp, start): Side, backend: &str) -> Fleet {
    Fleet::of_ranks(builder(connector, engine, &extra(backend), "cpu"), engine, tp, start)
}

/// SHM alone cannot read a device into host memory, and would refuse these.
// vLLM 45: peers of ranks in separate processes access host copies of pools on devices
fn on_devices_peers_see_copies_on_the_host(backend: &str) {
    let pulled = |from: Side, to: Side| {
        prompts_arrive(
            copied("NixlConnector", from, backend),
            copied("NixlConnector", to, backend),
        );
    };
    pulled(on_device("prefill", 2), on_device("decode", 1));
    pulled(on_device("prefill", 1), in_host_memory("decode", 2));
    pulled(in_host_memory("prefill", 2), on_device("decode", 1));
    let pushed = |side| copied("NixlPushConnector", side, backend);
    prompts_arrive(pushed(on_device("prefill", 2)), pushed(on_device("decode", 1)));
}

/// The engine reports chunks, and its ranks copy them meanwhile, with digests.
fn on_devices_chunks_are_copied_before_the_end(_: &str) {
    let extra = r#"{"backends": ["SHM"], "kvx_digest": true}"#;
    let fleet = |(engine, tp, start): Side| {
        Fleet::of_ranks(builder("NixlConnector", engine, extra, "cpu"), engine, tp, start)
    };
    let (mut prefill, mut decode) = (fleet(on_device("prefill", 2)), fleet(on_device("decode", 1)));
    let (request, tokens, here, there) = ("r".into(), 3 * BLOCK + 2, [5, 6, 8, 9], [1, 2, 3, 4]);
    let asked = TransferParams::ask_prefill();
    let arrival =
        Arrival { request: &request, prompt_tokens: tokens, params: Some(&asked), deadline: None };
    prefill.connector.on_new_request(arrival).unwrap();
    prefill.compute(1, &here, tokens);
    prefill.connector.computed(&request, &lists(&here[..2]), 2 * BLOCK);
    // A rank that copied the rest too early would publish this.
    prefill.compute(2, &[7, 7, 8, 9], tokens);
    prefill.compute(1, &here, tokens);
    let blocks = lists(&here);
    let status = Status::LengthCapped;
    let ending = Ending { status, blocks, computed: tokens, cached: None, reference: None };
    let params = prefill.connector.request_finished(&request, ending).params.unwrap();
    decode.fetch("d", &params, &there, LIMIT).join().unwrap();
    assert_eq!(decode.wrong(1, &there, 0..tokens), 0);
    prefill.end();
    decode.end();
}

fn on_devices_blocks_that_a_lost_rank_copied_are_not_published(backend: &str) {
    let mut prefill = copied("NixlConnector", on_device("prefill", 2), backend);
    prefill.compute(1, &[5], BLOCK);
    prefill.ranks[1].stop().unwrap();
    let began = Instant::now();
    let error = prefill.publish("r", &[5], BLOCK).unwrap_err();
    assert!(began.elapsed() < 3 * LIMIT, "{:?}", began.elapsed());
    let said = error.to_string();
    assert!(
        said.contains("could not be copied to the host") || said.contains("is missing"),
        "{said}"
    );
    drop(prefill);
}
