//! A bare loop over NIXL's C interface between two processes: the performance of NIXL without kvx,
//! as a baseline.
//!
//! It is a program for `kvx bench --beside` (see `kvx-cli/BESIDE.md`). It prepares the requests
//! before the rounds, one for each list, with adjacent pieces merged. Each transfer posts the next
//! of them and queries its state until it has ended. Neither agent has NIXL's thread. The library
//! is the one that `KVX_RIXL_LIB` names. Of kvx it uses only the bindings and the test kit's
//! baseline module. With arguments it measures notifications during transfers instead
//! ([`notices`]).

mod notices;

use kvx_backend::baseline::{self, Baseline, Channel, HugeMemory, Point, answer};
use kvx_backend::loader::{self, FunctionTable as _, Search};
use kvx_rixl::raw::*;
use std::ffi::{CStr, c_int, c_void};
use std::ptr::{null, null_mut};
use std::time::Duration;

/// How often an idle target makes progress, because the first request waits until both ends have
/// connected.
const LOOKS: Duration = Duration::from_millis(20);

/// An agent with the plugin UCX.
struct NixlAgent {
    nixl: Functions,
    raw: nixl_agent,
    args: nixl_opt_args,
    notifications: nixl_notif_map,
}

fn done(code: nixl_status) {
    assert_eq!(code, NIXL_CAPI_SUCCESS, "NIXL rejects a call");
}

impl NixlAgent {
    fn start(name: &CStr) -> NixlAgent {
        // The system's before the wheel's, as in kvx-rixl: with both in the other order, the
        // process crashes when it exits.
        loader::preload("libnl-route-3.so.200").ok();
        let search = Search::new("KVX_RIXL_LIB", &[], "set it to libnixl_capi.so");
        let library = search.open().expect("NIXL");
        let find = |name: &'static CStr| library.address(name);
        let (mut raw, mut params, mut backend) = (null_mut(), null_mut(), null_mut());
        let (mut args, mut notifications) = (null_mut(), null_mut());
        // SAFETY: nixl_capi.h allows each call on the handles that the calls before it have
        // created.
        unsafe {
            let nixl = Functions::find(find).expect("NIXL's functions");
            let config = nixl_agent_config { num_workers: 1, ..nixl_agent_config::default() };
            done((nixl.nixl_capi_create_configured_agent)(name.as_ptr(), &config, &mut raw));
            done((nixl.nixl_capi_create_params)(&mut params));
            let device = (c"engine_config".as_ptr(), c"NET_DEVICES=lo".as_ptr());
            done((nixl.nixl_capi_params_add)(params, device.0, device.1));
            done((nixl.nixl_capi_create_backend)(raw, c"UCX".as_ptr(), params, &mut backend));
            done((nixl.nixl_capi_create_opt_args)(&mut args));
            done((nixl.nixl_capi_opt_args_add_backend)(args, backend));
            done((nixl.nixl_capi_create_notif_map)(&mut notifications));
            NixlAgent { nixl, raw, args, notifications }
        }
    }

    /// Allocates and registers memory, for the life of the process.
    fn memory(&self, len: usize, foreign: bool) -> usize {
        let (address, mut list) = (HugeMemory::new(len, foreign).leak(), null_mut());
        let add = self.nixl.nixl_capi_reg_dlist_add_desc;
        // SAFETY: a list of this agent; the memory has that length, and stays valid.
        unsafe {
            done((self.nixl.nixl_capi_create_reg_dlist)(NIXL_CAPI_MEM_DRAM as c_int, &mut list));
            done(add(list, address, len, 0, null(), 0));
            done((self.nixl.nixl_capi_register_mem)(self.raw, list, self.args));
        }
        address
    }

    /// Returns the metadata with which peers access all of its memory.
    fn metadata(&self) -> Vec<u8> {
        let (mut data, mut len) = (null_mut::<c_void>(), 0);
        // SAFETY: locations for the answer, which has that many bytes.
        unsafe {
            done((self.nixl.nixl_capi_get_local_md)(self.raw, &mut data, &mut len));
            std::slice::from_raw_parts(data.cast::<u8>(), len).to_vec()
        }
    }

    fn load(&self, metadata: &[u8]) {
        let mut name = null_mut();
        // SAFETY: bytes from another agent's `metadata`, with their length.
        done(unsafe {
            (self.nixl.nixl_capi_load_remote_md)(
                self.raw,
                metadata.as_ptr().cast(),
                metadata.len(),
                &mut name,
            )
        });
    }

    fn look(&self) {
        // SAFETY: live handles.
        done(unsafe { (self.nixl.nixl_capi_get_notifs)(self.raw, self.notifications, null_mut()) });
    }

    /// Returns a request that moves `pieces`: local address, remote address and length.
    fn request(&self, read: bool, pieces: &[[usize; 3]]) -> nixl_xfer_req {
        let list = |end: usize| {
            let mut list = null_mut();
            // SAFETY: a list of this agent, of memory that stays valid.
            unsafe {
                done((self.nixl.nixl_capi_create_xfer_dlist)(
                    NIXL_CAPI_MEM_DRAM as c_int,
                    &mut list,
                ));
                for piece in pieces {
                    done((self.nixl.nixl_capi_xfer_dlist_add_desc)(list, piece[end], piece[2], 0));
                }
            }
            list
        };
        let op = if read { NIXL_CAPI_XFER_OP_READ } else { NIXL_CAPI_XFER_OP_WRITE } as c_int;
        let (create, target, mut request) =
            (self.nixl.nixl_capi_create_xfer_req, c"target".as_ptr(), null_mut());
        // SAFETY: lists with equally many ranges, of memory of both agents.
        done(unsafe { create(self.raw, op, list(0), list(1), target, &mut request, self.args) });
        request
    }

    fn transfer(&self, request: nixl_xfer_req) {
        // SAFETY: a request of this agent that is not in progress, posted once and queried until it
        // has ended.
        unsafe {
            let mut state = (self.nixl.nixl_capi_post_xfer_req)(self.raw, request, null_mut());
            while state == NIXL_CAPI_IN_PROG {
                state = (self.nixl.nixl_capi_get_xfer_status)(self.raw, request);
            }
            done(state);
        }
    }
}

/// Runs the target process: allocates memory of the lengths that it receives, and makes progress
/// meanwhile.
fn serve(channel: &Channel) {
    let agent = NixlAgent::start(c"target");
    loop {
        if !channel.wait(LOOKS) {
            agent.look();
            continue;
        }
        let Some((len, request)) = channel.receive() else { return };
        let Some((foreign, metadata)) = request.split_first() else { return };
        let address = agent.memory(len, *foreign == 1);
        agent.load(metadata);
        channel.send(address, &agent.metadata());
    }
}

/// Merges pieces that are adjacent at both ends.
fn merged(pieces: impl Iterator<Item = [usize; 3]>) -> Vec<[usize; 3]> {
    let mut runs: Vec<[usize; 3]> = Vec::new();
    for [our_memory, their_memory, len] in pieces {
        match runs.last_mut() {
            Some(run) if run[0] + run[2] == our_memory && run[1] + run[2] == their_memory => {
                run[2] += len
            }
            _ => runs.push([our_memory, their_memory, len]),
        }
    }
    runs
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let serve = |channel| {
        match arguments[..] {
            ["notices", _, how] => notices::serve(&channel, how == "polls"),
            _ => serve(&channel),
        }
        // SAFETY: ends the process. NIXL's libraries do not survive a regular exit everywhere.
        unsafe { libc::_exit(0) };
    };
    // SAFETY: the program has one thread, and has not loaded NIXL yet.
    let target = unsafe { baseline::fork(serve) };
    match arguments[..] {
        ["notices", slice, _] => {
            notices::read(&target, slice.parse().expect("the number of bytes per slice"))
        }
        _ => {
            let agent = NixlAgent::start(c"initiator");
            answer("NIXL", &mut Initiator { agent, target, requests: Vec::new() });
        }
    }
    // SAFETY: ends the process. NIXL's libraries do not survive a regular exit everywhere.
    unsafe { libc::_exit(0) };
}

/// The initiator process.
struct Initiator {
    agent: NixlAgent,
    target: Channel,
    /// A prepared request for each list.
    requests: Vec<nixl_xfer_req>,
}

impl Baseline for Initiator {
    fn prepare(&mut self, point: &Point) -> Option<String> {
        let local_memory = self.agent.memory(point.bytes(), point.foreign);
        let request = [&[point.foreign.into()], self.agent.metadata().as_slice()].concat();
        self.target.send(point.bytes(), &request);
        let (remote_memory, metadata) = self.target.receive().expect("the target is alive");
        self.agent.load(&metadata);
        let request = |list| {
            let pieces = point.pairs[point.list(list)].iter().map(|(local, remote)| {
                let (local, remote) = (local * point.block, remote * point.block);
                [local_memory + local, remote_memory + remote, point.block]
            });
            self.agent.request(point.read, &merged(pieces))
        };
        self.requests = (0..point.lists()).map(request).collect();
        self.agent.transfer(self.requests[0]);
        None
    }

    fn transfer(&mut self, _: &Point, list: usize) {
        self.agent.transfer(self.requests[list]);
    }
}
