//! Pulls that reached no worker. The prefill may have restarted under its name, with another
//! address.

use super::action::PullId;
use super::pull::{PullStage, Said};
use super::worker::MooncakeWorker;
use crate::time::Time;

impl MooncakeWorker {
    /// Handles a pull that reached no worker. Its loads fail, with one exception. If a load used
    /// remembered addresses, and no worker of its prefill has received its pulls, the bootstrap
    /// server is queried for the current addresses.
    pub(super) fn unheard(&mut self, now: Time, pull: PullId, why: &str) {
        let Some(asked) = self.pulls.get(&pull) else {
            return debug_assert!(false, "unanswered looks the question up");
        };
        for request in asked.waiting.clone() {
            let Some(load) = self.loads.get_mut(&request) else {
                debug_assert!(false, "a question waits only for loads that exist");
                continue;
            };
            let others =
                load.answers.iter().filter(|(id, _)| **id != pull).map(|(_, answer)| answer.said);
            let may_be_elsewhere = load.stage == PullStage::Asked
                && load.from_memory
                && !load.is_given_up()
                && others.clone().all(|said| matches!(said, Said::Nothing | Said::Unheard));
            if !may_be_elsewhere {
                self.said(now, pull, &request, Said::Settled, why);
            } else if others.clone().all(|said| said == Said::Unheard) {
                (load.stage, load.from_memory) = (PullStage::Waiting, false);
                load.answers.clear();
                self.query(now, request);
            } else if let Some(answer) = load.answers.get_mut(&pull) {
                answer.said = Said::Unheard;
            }
        }
        self.hang_up(pull);
    }
}
