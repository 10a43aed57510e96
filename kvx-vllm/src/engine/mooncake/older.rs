//! The protocol before vLLM 0.16. The addresses of a prefill's workers follow from its parameters.
//! A plain Mooncake agent sends pulls in another form, and gets one answer to each.

use std::sync::Arc;

use kvx_core::{ErrorKind, Result};

use super::super::remote::RemoteEngine;
use super::action::{AskId, PullId};
use super::ask::AnswerForm;
use super::directory::Listed;
use super::worker::MooncakeWorker;
use crate::ids::{Address, EngineId, RequestId, WorkerRank};
use crate::time::Time;
use crate::wire::mooncake::{OlderAnswer, OlderPullRequest, PullRequest, PullResponse, PullStatus};

/// Returns the name for a prefill that sends none: its address. Only kvx prefills send a name.
pub(in super::super) fn older_prefill(address: &Address) -> EngineId {
    tcp(address, address.port).as_str().into()
}

fn tcp(address: &Address, port: u16) -> String {
    match address.host.contains(':') {
        true => format!("tcp://[{}]:{port}", address.host),
        false => format!("tcp://{}:{port}", address.host),
    }
}

impl MooncakeWorker {
    /// Returns the one worker of a prefill that this worker asks, which has the same rank.
    ///
    /// # Errors
    ///
    /// Fails if the worker's port would be above 65535.
    pub(super) fn older_listed(
        &self,
        now: Time,
        peer: &RemoteEngine,
    ) -> std::result::Result<Listed, String> {
        let (tp_size, tp) = (self.settings.tp_size, self.rank.tp);
        let port = u16::try_from(tp).ok().and_then(|tp| peer.address.port.checked_add(tp));
        let port = port.ok_or_else(|| {
            format!(
                "remote_port {} + tensor rank {tp} is above 65535: lower the prefill's \
                 VLLM_MOONCAKE_BOOTSTRAP_PORT",
                peer.address.port
            )
        })?;
        let workers = [(WorkerRank { pp: 0, tp }, Arc::from(tcp(&peer.address, port)))].into();
        let is_kvx = peer.engine != older_prefill(&peer.address);
        Ok(Listed { tp_size, pp_size: 1, is_kvx, workers, used: now })
    }

    /// Handles a pull in the form before vLLM 0.16, as [`asked`](Self::asked) does.
    ///
    /// # Errors
    ///
    /// Fails if the pull is invalid. The decode gets an answer; the caller should log the error.
    pub fn older_asked(
        &mut self,
        now: Time,
        ask: AskId,
        question: Result<OlderPullRequest>,
    ) -> Result<()> {
        let asked = match question {
            Ok(OlderPullRequest { kvx_question: Some(bytes), .. }) => {
                let question =
                    PullRequest::decode(&bytes).and_then(|question| self.of_same_sizes(question));
                return self.asked(now, ask, question);
            }
            Ok(plain) => plain.as_pull_request(&self.own).map(|mut question| {
                for wanted in &mut question.req_blocks {
                    self.transfers.resolve(&mut wanted.transfer_id);
                }
                question
            }),
            Err(error) => Err(error),
        };
        self.asked_in(now, ask, asked, AnswerForm::Older { failed: false })
    }

    /// Rejects a decode of another size, which would ask one worker for the blocks of several.
    fn of_same_sizes(&self, question: PullRequest) -> Result<PullRequest> {
        let (here, there) = (self.settings.tp_size, question.remote_tp_size);
        if here == there {
            return Ok(question);
        }
        Err(ErrorKind::Incompatible.because(format!(
            "tensor-parallel size {there} at the decode and {here} at the prefill: before vLLM \
             0.16 the MooncakeConnector requires the same size on both sides; set kv_compat to \
             0.16 or later on both"
        )))
    }

    /// Handles the answer of a plain Mooncake agent before vLLM 0.16, which covers the whole pull.
    pub fn older_answered(&mut self, now: Time, pull: PullId, answer: Result<OlderAnswer>) {
        // Expected race: the question timed out, or none of its loads is left.
        let Some(asked) = self.pulls.get(&pull) else { return };
        let all = Some(asked.waiting.iter().map(|request| request.as_str().to_owned()).collect());
        let answer = answer.map(|answer| {
            let mut response = PullResponse::new(PullStatus::Finish);
            match answer {
                OlderAnswer::Done => response.ok_reqs = all,
                OlderAnswer::Failed => {
                    response.err_reqs = all;
                    response.err_msg = Some("the prefill answered trans_error; see its log".into());
                }
            }
            response
        });
        self.answered(now, pull, answer);
    }

    /// Gives a local request the additional name that all engines share. Earlier pulls by that name
    /// mean this request.
    pub(super) fn known_as(&mut self, request: &RequestId) {
        let shared = RequestId::from(request.shared());
        if shared == *request {
            return;
        }
        self.transfers.alias(shared.clone(), request.clone());
        let waiting = self.asked_for.remove(&shared).unwrap_or_default();
        for id in &waiting {
            if let Some(serve) = self.serves.get_mut(id) {
                serve.rename(request.clone(), &mut self.serve_bytes);
            }
        }
        if !waiting.is_empty() {
            self.asked_for.entry(request.clone()).or_default().extend(waiting);
        }
    }
}
