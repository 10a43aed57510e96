//! Explains where a router would send a request, and why.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::endpoint::{Endpoint, client};
use crate::error::{Error, Result};

/// Where a router would send a request now, and why.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Explanation {
    /// The route, as the header `x-kvx-route` names it; `none` for a request that gets 503.
    pub route: String,
    /// The model, if the request names one.
    pub model: Option<String>,
    /// The estimated length of the prompt.
    pub prompt_tokens: u64,
    /// The estimated length of the answer.
    pub new_tokens: u64,
    /// The prefill instances, if the request needs one.
    pub prefill: Option<SideReport>,
    /// The decode instances, unless no prefill instance can serve the request.
    pub decode: Option<SideReport>,
    /// Further circumstances that affect the request.
    pub notes: Vec<String>,
}

/// The instances of a role that a request may go to.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct SideReport {
    /// The policy of the choice: `cached`, `least-tokens`, `round-robin` or `prefix`.
    pub policy: String,
    /// The chosen instance.
    pub winner: Option<String>,
    /// The reason for the choice.
    pub why: String,
    /// All instances of the role.
    pub candidates: Vec<CandidateReport>,
}

/// An instance that a request may go to.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct CandidateReport {
    /// Its host and port.
    pub instance: String,
    /// Its pool.
    pub pool: String,
    /// Its state, as `/status` shows it.
    pub state: String,
    /// The tokens of requests in progress there.
    pub queued_tokens: u64,
    /// The tokens of this prompt that it has cached, as the router predicts it; `None` if the
    /// policy does not consider them.
    pub cached_tokens: Option<u64>,
    /// The source of that prediction: `exact` for the instance's KV events, `degraded` if some of
    /// them are missing, or `history`. `None` if the policy does not consider it.
    #[serde(default)]
    pub knowledge: Option<String>,
    /// The tokens for which this request would count there.
    pub tokens_to_compute: u64,
    /// Its share of requests.
    pub weight: f64,
    /// The number that the policy compares: queued tokens and those to compute, divided by the
    /// weight. `None` if the instance is excluded, or the policy compares none.
    pub cost: Option<f64>,
    /// Why it cannot get the request.
    pub why_not: Option<String>,
}

impl SideReport {
    pub(crate) fn new(
        policy: &str,
        winner: Option<String>,
        why: String,
        candidates: Vec<CandidateReport>,
    ) -> Self {
        SideReport { policy: policy.to_owned(), winner, why, candidates }
    }

    /// Returns the tokens for which the request would count at an instance.
    pub(crate) fn tokens_at(&self, instance: &str) -> Option<u64> {
        let found = self.candidates.iter().find(|one| one.instance == instance);
        found.map(|one| one.tokens_to_compute)
    }
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "route: {}", self.route)?;
        let model = self.model.as_deref().unwrap_or("any");
        let (prompt, new) = (self.prompt_tokens, self.new_tokens);
        writeln!(f, "model {model}, about {prompt} prompt tokens and {new} new tokens")?;
        for (role, side) in [("prefill", &self.prefill), ("decode", &self.decode)] {
            if let Some(side) = side {
                write!(f, "\n{role}, by {}: ", side.policy)?;
                let winner = side.winner.as_deref().unwrap_or("none");
                writeln!(f, "{winner}, because {}\n{side}", side.why)?;
            }
        }
        self.notes.iter().try_for_each(|note| writeln!(f, "note: {note}"))
    }
}

impl fmt::Display for SideReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut rows = vec![
            [
                "",
                "instance",
                "pool",
                "state",
                "queued",
                "cached",
                "by",
                "to compute",
                "weight",
                "cost",
            ]
            .map(str::to_owned),
        ];
        for one in &self.candidates {
            let wins = self.winner.as_ref() == Some(&one.instance) && one.why_not.is_none();
            let number = |value: Option<String>| value.unwrap_or_else(|| "-".to_owned());
            rows.push([
                if wins { "->" } else { "" }.to_owned(),
                one.instance.clone(),
                one.pool.clone(),
                one.state.clone(),
                one.queued_tokens.to_string(),
                number(one.cached_tokens.map(|tokens| tokens.to_string())),
                number(one.knowledge.clone()),
                one.tokens_to_compute.to_string(),
                one.weight.to_string(),
                number(one.cost.map(|cost| format!("{cost:.0}"))),
            ]);
        }
        let width = |column: usize| rows.iter().map(|row| row[column].len()).max().unwrap_or(0);
        let widths: Vec<usize> = (0..rows[0].len()).map(width).collect();
        for (at, row) in rows.iter().enumerate() {
            let mut line = String::new();
            for (column, (cell, width)) in row.iter().zip(&widths).enumerate() {
                // Texts to the left, numbers to the right.
                line += &match column < 4 {
                    true => format!("{cell:width$}  "),
                    false => format!("{cell:>width$}  "),
                };
            }
            let why_not = at.checked_sub(1).and_then(|at| self.candidates[at].why_not.as_deref());
            line += why_not.unwrap_or_default();
            writeln!(f, "{}", line.trim_end())?;
        }
        Ok(())
    }
}

/// Asks a running router where it would send a request, without sending it. `request` is the JSON
/// body of a completion or a chat completion, and `key` the router's `ADMIN_API_KEY`.
///
/// # Errors
///
/// Fails if the URL is invalid, or if the router does not answer or rejects the request or the key.
pub async fn explain(router: &str, request: &str, key: Option<&str>) -> Result<Explanation> {
    let endpoint = [Endpoint::new(router)?];
    let client = client(&endpoint)?;
    let failed = |why: &dyn fmt::Display| Error::new(format!("{router}: POST /explain: {why}"));
    let answer = endpoint[0].ask(&client, key, "/explain", Some(request.to_owned())).await;
    let answer = answer.map_err(|error| failed(&error))?;
    serde_json::from_value(answer).map_err(|error| failed(&error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_explanation_reads_as_a_table() {
        let one = |instance: &str, cached, cost, why_not: Option<&str>| CandidateReport {
            instance: instance.to_owned(),
            pool: "default".to_owned(),
            state: "up".to_owned(),
            queued_tokens: 300,
            cached_tokens: Some(cached),
            knowledge: Some("history".to_owned()),
            tokens_to_compute: 1200 - cached,
            weight: 1.0,
            cost,
            why_not: why_not.map(str::to_owned),
        };
        let candidates = vec![
            one("10.0.0.1:8100", 1024, Some(476.0), None),
            one("10.0.0.22:8100", 0, None, Some("it is draining")),
        ];
        let winner = Some("10.0.0.1:8100".to_owned());
        let side =
            SideReport::new("cached", winner, "no other may serve it".to_owned(), candidates);
        let explanation = Explanation {
            route: "disaggregated".to_owned(),
            model: None,
            prompt_tokens: 1200,
            new_tokens: 16,
            prefill: Some(side),
            decode: None,
            notes: vec!["a note".to_owned()],
        };
        assert_eq!(
            explanation.to_string(),
            "route: disaggregated\n\
             model any, about 1200 prompt tokens and 16 new tokens\n\n\
             prefill, by cached: 10.0.0.1:8100, because no other may serve it\n    \
                 instance        pool     state  queued  cached       by  to compute  weight  cost\n\
             ->  10.0.0.1:8100   default  up        300    1024  history         176       1   476\n    \
                 10.0.0.22:8100  default  up        300       0  history        1200       1     -  it is draining\n\n\
             note: a note\n"
        );
    }
}
