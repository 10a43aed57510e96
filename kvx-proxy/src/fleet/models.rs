//! Which instance serves which model: names as bits, so that a choice among hundreds looks at one
//! word each.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};

use serde_json::Value;

/// The numbers of model names, shared by a fleet: the first 63 have a bit each, all others one
/// together, behind which the names themselves are compared.
#[derive(Debug, Default)]
pub(crate) struct ModelNames(Mutex<Vec<String>>);

/// The name of a model in a request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ModelName<'a> {
    name: &'a str,
    /// None if no instance ever named it.
    bit: u64,
}

/// The bit of all names without one of their own.
const OTHERS: u64 = 1 << OWN_BITS;
/// How many names have one.
const OWN_BITS: usize = 63;

impl ModelNames {
    /// The model of this name.
    pub(crate) fn named<'a>(&self, name: &'a str) -> ModelName<'a> {
        let names = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let bit = match names.iter().position(|known| known == name) {
            Some(place) => 1 << place,
            None if names.len() == OWN_BITS => OTHERS,
            None => 0,
        };
        ModelName { name, bit }
    }

    fn learn(&self, name: &str) -> u64 {
        let mut names = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let place = names.iter().position(|known| known == name).unwrap_or(names.len());
        if place == names.len() && place < OWN_BITS {
            names.push(name.to_owned());
        }
        1 << place
    }
}

/// What one instance has said that it serves.
#[derive(Debug, Default)]
pub(crate) struct Models {
    /// None until it has said anything.
    bits: AtomicU64,
    cards: Mutex<Arc<BTreeMap<String, Value>>>,
}

impl Models {
    /// The bits of the models that it may serve: all of them until it has said anything.
    pub(super) fn bits(&self) -> u64 {
        match self.bits.load(Relaxed) {
            0 => u64::MAX,
            bits => bits,
        }
    }

    /// Whether it may serve this model.
    pub(crate) fn serve(&self, model: ModelName<'_>) -> bool {
        let bits = self.bits.load(Relaxed);
        let alone = || model.bit != OTHERS || self.cards().contains_key(model.name);
        bits == 0 || (bits & model.bit != 0 && alone())
    }

    /// Whether there is a model that both may serve.
    pub(super) fn share_one(&self, other: &Models) -> bool {
        let (ours, theirs) = (self.bits.load(Relaxed), other.bits.load(Relaxed));
        if ours == 0 || theirs == 0 || owned(ours & theirs) {
            return true;
        }
        let theirs_too =
            |theirs: &BTreeMap<_, _>| self.cards().keys().any(|name| theirs.contains_key(name));
        ours & theirs != 0 && theirs_too(&other.cards())
    }

    /// The cards of `/v1/models` by their ids; empty until it has said anything.
    pub(crate) fn cards(&self) -> Arc<BTreeMap<String, Value>> {
        Arc::clone(&self.cards.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Takes an answer to `GET /v1/models`. Whatever is no list of models is as if nothing had been
    /// said.
    pub(crate) fn learn(&self, answer: &Value, names: &ModelNames) {
        let list =
            answer.get("data").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
        let id = |card: &Value| card.get("id").and_then(Value::as_str).map(str::to_owned);
        let cards: BTreeMap<String, Value> =
            list.iter().take(4096).filter_map(|card| Some((id(card)?, card.clone()))).collect();
        if cards.is_empty() {
            return;
        }
        let bits = cards.keys().fold(0, |bits, name| bits | names.learn(name));
        *self.cards.lock().unwrap_or_else(PoisonError::into_inner) = Arc::new(cards);
        self.bits.store(bits, Relaxed);
    }
}

/// Whether a bit of these is one name's own.
pub(super) fn owned(bits: u64) -> bool {
    bits & !OTHERS != 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_instance_serves_what_it_named_and_before_that_anything() {
        let (names, models) = (ModelNames::default(), Models::default());
        assert!(models.serve(names.named("a")));
        models.learn(&serde_json::json!({"data": [{"id": "a"}, {"id": "b"}]}), &names);
        assert!(models.serve(names.named("a")) && models.serve(names.named("b")));
        assert!(!models.serve(names.named("c")));
        models.learn(&serde_json::json!({"error": "no"}), &names);
        assert_eq!(models.cards().len(), 2, "an error says nothing");
    }

    fn of(names: &ModelNames, models: impl IntoIterator<Item = String>) -> Models {
        let cards: Vec<_> = models.into_iter().map(|id| serde_json::json!({ "id": id })).collect();
        let models = Models::default();
        models.learn(&serde_json::json!({ "data": cards }), names);
        models
    }

    fn loras(range: std::ops::Range<u32>) -> impl Iterator<Item = String> {
        range.map(|number| format!("lora-{number}"))
    }

    #[test]
    fn names_that_share_a_bit_are_told_apart() {
        let names = ModelNames::default();
        let few = of(&names, ["first".to_owned()]);
        let many = of(&names, loras(0..100));
        assert!(many.serve(names.named("lora-0")) && many.serve(names.named("lora-99")));
        assert!(!few.serve(names.named("lora-99")) && !many.serve(names.named("first")));
        assert!(
            !many.serve(names.named("lora-100")),
            "it shares the bit of others, and is none of them"
        );
        let later = of(&names, loras(100..200));
        assert!(later.serve(names.named("lora-100")) && !later.serve(names.named("lora-99")));
        assert!(!many.share_one(&later) && !later.share_one(&many));
        assert!(many.share_one(&of(&names, loras(99..101))) && !many.share_one(&few));
    }

    #[test]
    fn who_has_a_model_for_each_bit_does_not_serve_any_model() {
        let names = ModelNames::default();
        let all = of(&names, loras(0..64));
        assert!(!all.serve(names.named("another")));
        assert!(!all.share_one(&of(&names, ["another".to_owned()])));
        assert!(all.share_one(&Models::default()), "who has said nothing may serve it");
    }
}
