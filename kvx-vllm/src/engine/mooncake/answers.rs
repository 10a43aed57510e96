//! Answers to the pulls of decodes.

use super::action::{AskId, MooncakeAction};
use super::ask::AnswerForm;
use super::worker::MooncakeWorker;
use crate::ids::RequestId;
use crate::wire::mooncake::{OlderAnswer, PullResponse, PullStatus};

impl MooncakeWorker {
    /// Answers for one request, if its pull is still open.
    pub(super) fn tell(
        &mut self,
        ask: AskId,
        theirs: &RequestId,
        why: Option<&str>,
        settled: bool,
        last: bool,
    ) {
        // Expected race: it has had its last answer.
        let Some(open) = self.asks.get_mut(&ask).filter(|open| open.left.contains(theirs)) else {
            return;
        };
        if last {
            open.left.remove(theirs);
        }
        let over = open.left.is_empty();
        if let AnswerForm::Older { failed } = &mut open.form {
            *failed |= why.is_some();
            if !over {
                return;
            }
        }
        let form = open.form;
        let mut response =
            PullResponse::new(if over { PullStatus::Finish } else { PullStatus::Continue });
        response.layout_id = open.layout_id;
        let named = Some(vec![theirs.as_str().to_owned()]);
        match why {
            None => response.ok_reqs = named,
            Some(why) => {
                response.err_reqs = named;
                response.err_msg = Some(why.to_owned());
                response.kvx_settled = settled;
            }
        }
        if over {
            self.asks.remove(&ask);
        }
        self.answer(ask, form, &response);
    }

    pub(super) fn answer(&mut self, ask: AskId, form: AnswerForm, response: &PullResponse) {
        let bytes = match form {
            AnswerForm::Each => response.encode(),
            AnswerForm::Older { failed } => {
                let answer = match response.status {
                    PullStatus::Finish if !failed => OlderAnswer::Done,
                    _ => OlderAnswer::Failed,
                };
                answer.encode().to_vec()
            }
        };
        self.actions.push_back(MooncakeAction::Answer { ask, bytes });
    }
}
