//! The half next to vLLM's scheduler.

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use kvx::ErrorKind;
use kvx::config::{KvTransferConfig, Role, Surroundings};
use kvx::connector::{
    Allocation, Arrival, BlockLists, CompatibilityFactors, CompatibilityHash, Connector, Ending,
    Group, LoadFailure, Outcome, Rank, RequestId, Status, TransferParams, WorkerRank,
};
use kvx_core::backend::sync::Mutex;
use kvx_vllm::engine::StepReports;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use serde_json::Value;

use crate::{Process, log_to_stderr, malformed, parse, python_error, socket, stats};

/// How long the workers have to join once the scheduler exists. They have registered their caches
/// before.
const TO_JOIN: Duration = Duration::from_secs(60);
/// How long the connector has to end. vLLM gives a worker 5 s.
const TO_END: Duration = Duration::from_secs(3);

/// The longest wait of the reporting thread before it looks whether the connector has ended.
const PAUSE: Duration = Duration::from_millis(200);

/// The longest `kv_transfer_params`, as JSON: the blocks of prompts of millions of tokens.
const MAX_PARAMS: usize = 4 << 20;

/// The half next to vLLM's scheduler. Its methods have the names of vLLM's.
#[pyclass(frozen, module = "kvx._kvx")]
pub(crate) struct Scheduler {
    connector: Connector,
    ranks: Vec<Rank>,
    socket: PathBuf,
    process: Process,
    /// False with the role `kv_producer`.
    may_load: bool,
    state: Arc<Mutex<State>>,
}

#[derive(Default)]
struct State {
    reports: StepReports,
    /// The tokens that each request had when it asked for more.
    computed: HashMap<RequestId, u32>,
    /// The number of loads with stale blocks since vLLM took the statistics last.
    stale: usize,
    /// The number of loads with corrupt blocks since then.
    corrupt: usize,
    /// The number of requests since then whose parameters were refused.
    refused: usize,
    /// True if the connector was shut down.
    ends: bool,
}

#[pymethods]
impl Scheduler {
    /// Starts the connector that `engine` describes, as JSON, and waits for its workers.
    #[new]
    fn new(py: Python<'_>, engine: &str) -> PyResult<Self> {
        let engine = Engine::parse(engine)?;
        py.detach(|| {
            log_to_stderr();
            stats::install();
            engine.start().map_err(|error| python_error(&error))
        })
    }

    /// The host and port at which peers reach this engine.
    fn address(&self) -> (String, u16) {
        let address = self.connector.address();
        (address.host.to_string(), address.port)
    }

    /// Announces a request with its `kv_transfer_params`, as JSON. They come from a client.
    fn on_new_request(
        &self,
        request: &str,
        prompt_tokens: u32,
        params: Option<&str>,
    ) -> PyResult<()> {
        self.process.check()?;
        let params = params.map(|params| self.read(request, params)).transpose();
        let request = RequestId::from(request);
        let noted = params.and_then(|params| {
            let params = params.as_ref();
            let arrival = Arrival { request: &request, prompt_tokens, params, deadline: None };
            self.connector.on_new_request(arrival).map_err(|why| why.to_string())
        });
        if let Err(why) = noted {
            tracing::warn!(%request, "its kv_transfer_params are not used: {why}");
            self.state.lock().refused += 1;
        }
        Ok(())
    }

    /// Returns how many tokens beyond `computed` a peer has, and whether they are loaded while
    /// other requests run.
    fn get_num_new_matched_tokens(&self, request: &str, computed: u32) -> PyResult<(u32, bool)> {
        self.process.check()?;
        let request = RequestId::from(request);
        let matched = self.connector.get_num_new_matched_tokens(&request, computed);
        if matched.tokens > 0 {
            self.state.lock().computed.insert(request, computed);
        }
        Ok((matched.tokens, matched.tokens > 0 && matched.asynchronous))
    }

    /// Orders the load of `external` tokens into the blocks `fill`, a list for each group.
    fn update_state_after_alloc(
        &self,
        request: &str,
        fill: Vec<Vec<u32>>,
        external: u32,
    ) -> PyResult<()> {
        self.process.check()?;
        let request = RequestId::from(request);
        let fill = BlockLists::new(fill);
        let mut state = self.state.lock();
        let computed = state.computed.get(&request).copied().unwrap_or_default();
        if external > 0 {
            state.reports.expect(&request);
        }
        let ordered = self
            .connector
            .update_state_after_alloc(&request, Allocation { fill, computed, external });
        if let Err(why) = ordered {
            tracing::warn!(%request, "its blocks are not loaded: {why}");
            state.reports.refuse(&request);
        }
        Ok(())
    }

    /// Ends a step. Returns the report that each worker makes to vLLM.
    fn build_connector_meta<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        self.process.check()?;
        self.connector.step();
        self.ranks.iter().for_each(Rank::start_load_kv);
        if let Some(why) = self.connector.missing_rank() {
            return Err(PyRuntimeError::new_err(format!(
                "KvxConnector has lost a worker, so that it can move no blocks: {why}; restart this vLLM"
            )));
        }
        let mut state = self.state.lock();
        take_outcomes(&self.connector, &mut state);
        Ok(PyBytes::new(py, &state.reports.take().encode()))
    }

    /// Ends a request that has these blocks, a list for each group. Returns whether vLLM keeps them
    /// until they are reported as sent, and the `kv_transfer_params` of the answer, as JSON.
    fn request_finished(
        &self,
        py: Python<'_>,
        request: &str,
        status: &str,
        blocks: Vec<Vec<u32>>,
        computed: u32,
    ) -> PyResult<(bool, Option<String>)> {
        self.process.check()?;
        let request = RequestId::from(request);
        let ending = Ending {
            status: status_of(status),
            blocks: BlockLists::new(blocks),
            computed,
            cached: None,
            reference: None,
        };
        // It may wait for digests and for copies to the host.
        py.detach(|| {
            let mut state = self.state.lock();
            // Outcomes from before the end of the request are not results of that end.
            take_outcomes(&self.connector, &mut state);
            state.computed.remove(&request);
            let waits = state.reports.waits(&request);
            let finished = self.connector.request_finished(&request, ending);
            state.reports.finish(&request, finished.delay_free);
            if let Some(withheld) = &finished.withheld {
                tracing::warn!(%request, "no peer can load its blocks: {}", withheld.reason);
            }
            // vLLM keeps the blocks of a load until its report.
            let keeps = finished.delay_free && !waits;
            let params = finished.params.map(|params| serde_json::to_string(&params)).transpose();
            let params = params.map_err(|error| PyRuntimeError::new_err(error.to_string()))?;
            Ok((keeps, params))
        })
    }

    /// Returns what vLLM's `NixlKVConnectorStats` has in its lists, and the numbers of loads that
    /// failed because their blocks were stale or corrupt, and of requests whose parameters were
    /// refused.
    fn get_kv_connector_stats(&self) -> PyResult<BTreeMap<&'static str, Vec<f64>>> {
        self.process.check()?;
        let state = &mut *self.state.lock();
        let mut stats = stats::take();
        for (list, count) in [
            ("num_stale_loads", &mut state.stale),
            ("num_corrupt_loads", &mut state.corrupt),
            ("num_refused_params", &mut state.refused),
        ] {
            if *count > 0 {
                stats.insert(list, vec![1.0; std::mem::take(count)]);
            }
        }
        Ok(stats)
    }

    /// Ends the connector: loads fail and peers are refused.
    fn shutdown(&self, py: Python<'_>) -> PyResult<()> {
        self.process.check()?;
        py.detach(|| {
            self.state.lock().ends = true;
            let ended = self.connector.shutdown(TO_END).wait_blocking(TO_END);
            if let Err(why) = ended {
                tracing::warn!("the connector did not end in time: {why}");
            }
            std::fs::remove_file(&self.socket).ok();
        });
        Ok(())
    }
}

impl Scheduler {
    /// Reads the parameters of a client. Errors: why they are not used.
    fn read(&self, request: &str, params: &str) -> Result<TransferParams, String> {
        let most = StepReports::MAX_NAME;
        if request.len() > most || params.len() > MAX_PARAMS {
            return Err(format!(
                "the request's id may have {most} bytes, and its parameters {MAX_PARAMS}"
            ));
        }
        let params = serde_json::from_str(params).map_err(|error| error.to_string())?;
        let params = TransferParams::from_value(&params).map_err(|error| error.to_string())?;
        if params.remote_request_id.as_ref().is_some_and(|id| id.len() > most) {
            return Err(format!("remote_request_id may have {most} bytes"));
        }
        // vLLM keeps blocks from a step that still writes to them only in engines that load.
        let loads = params.do_remote_prefill || params.remote_block_ids.is_some();
        if loads && !self.may_load {
            return Err("this engine's kv_role is kv_producer, so it loads nothing: send decodes \
                        to another engine, or set kv_role to kv_both"
                .to_owned());
        }
        Ok(params)
    }
}

fn take_outcomes(connector: &Connector, state: &mut State) {
    for outcome in connector.outcomes() {
        if let Outcome::Failed { request, failure, .. } = &outcome {
            tracing::warn!(%request, "its load has failed: {failure}");
            state.stale += usize::from(*failure == LoadFailure::Stale);
            state.corrupt += usize::from(*failure == LoadFailure::Corrupt);
        }
        let lost = matches!(outcome, Outcome::Lost { .. }).then(|| format!("{outcome:?}"));
        if !state.reports.note(outcome) {
            tracing::error!(
                "a transfer may touch these blocks until this process exits, so they are never \
                 used again: {}",
                lost.unwrap_or_default()
            );
        }
    }
}

/// Sends outcomes to the workers as they arise, so that the workers report them in the step that
/// runs now.
fn report(connector: &Connector, ranks: &[Rank], state: &Mutex<State>) {
    while !state.lock().ends {
        if !connector.outcomes_ready_blocking(PAUSE) {
            continue;
        }
        let mut state = state.lock();
        take_outcomes(connector, &mut state);
        loop {
            let note = state.reports.take().encode();
            if note.is_empty() {
                break;
            }
            if let Some(why) = ranks.iter().find_map(|rank| rank.note(&note).err()) {
                tracing::warn!("a worker cannot report to vLLM: {why}");
                return;
            }
        }
    }
}

/// Translates the name of a `RequestStatus`. A request that has ended in any other way keeps no
/// blocks.
fn status_of(name: &str) -> Status {
    match name {
        "FINISHED_LENGTH_CAPPED" => Status::LengthCapped,
        "FINISHED_STOPPED" => Status::Stopped,
        "FINISHED_ABORTED" => Status::Aborted,
        _ => Status::Failed,
    }
}

/// An engine, as `vllm.py` describes it.
struct Engine {
    config: Value,
    model: String,
    factors: serde_json::Map<String, Value>,
    hash: String,
    groups: Vec<Group>,
    workers: (u32, u32, u32),
    data_parallel: u32,
    block_size: u32,
    socket: String,
}

impl Engine {
    fn parse(text: &str) -> PyResult<Self> {
        let engine = parse(text)?;
        let field = |name: &str| engine.get(name).ok_or_else(|| malformed(name));
        let string =
            |name: &str| field(name)?.as_str().map(str::to_owned).ok_or_else(|| malformed(name));
        let number = |value: &Value| value.as_u64().and_then(|number| u32::try_from(number).ok());
        let count = |name: &str| number(field(name)?).ok_or_else(|| malformed(name));
        let group = |group: &Value| match group {
            Value::Null => Ok(Group::Whole),
            tokens => number(tokens)
                .map(|tokens| Group::Window { tokens })
                .ok_or_else(|| malformed("groups")),
        };
        let groups = field("groups")?.as_array().ok_or_else(|| malformed("groups"))?;
        Ok(Engine {
            config: field("config")?.clone(),
            model: string("model")?,
            factors: field("factors")?.as_object().ok_or_else(|| malformed("factors"))?.clone(),
            hash: string("hash")?,
            groups: groups.iter().map(group).collect::<PyResult<_>>()?,
            workers: (count("tp")?, count("pp")?, count("dcp")?),
            data_parallel: count("data_parallel")?,
            block_size: count("block_size")?,
            socket: string("socket")?,
        })
    }

    fn start(self) -> kvx::Result<Scheduler> {
        let surroundings = Surroundings::of_process();
        let config = KvTransferConfig::from_json(&self.config.to_string(), &surroundings)?;
        let mut factors = CompatibilityFactors::from_config(&config, self.model);
        if let Some(backend) = self.factors.get("attn_backend_name").and_then(Value::as_str) {
            backend.clone_into(&mut factors.attn_backend_name);
        }
        factors.further = self.factors;
        let (tp, pp, dcp) = self.workers;
        let may_load = config.kv_role() != Some(Role::Producer);
        let connector = Connector::builder(&config, kvx::registry(), factors)
            .compatibility_hash(CompatibilityHash::foreign(self.hash))
            .groups(self.groups)
            .block_size(self.block_size)
            .workers(tp, pp)
            .decode_context_parallel(dcp)
            .data_parallel_rank(self.data_parallel)
            .build_blocking()?;
        let socket = socket::path(&self.socket)?;
        let ranks = (0..pp).flat_map(|pp| (0..tp).map(move |tp| WorkerRank { pp, tp }));
        let ranks = ranks.map(|rank| connector.rank(rank)).collect::<kvx::Result<Vec<_>>>()?;
        let joined = connector.group(&socket, TO_JOIN).wait_blocking(TO_JOIN * 2);
        if let Err(error) = joined {
            std::fs::remove_file(&socket).ok();
            return Err(error);
        }
        let state = Arc::new(Mutex::new(State::default()));
        let shared = (connector.clone(), ranks.clone(), Arc::clone(&state));
        let reports = move || report(&shared.0, &shared.1, &shared.2);
        std::thread::Builder::new().name("kvx-reports".into()).spawn(reports).map_err(|error| {
            ErrorKind::Native.because(format!("cannot start a thread: {error}"))
        })?;
        Ok(Scheduler { connector, ranks, socket, process: Process::current(), may_load, state })
    }
}
