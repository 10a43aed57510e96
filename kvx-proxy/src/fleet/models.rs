//! The models that each instance serves. Names are bits, so that a choice among hundreds of
//! instances reads one integer for each.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};

use serde_json::Value;

/// The bits of model names, shared by a fleet. The first 63 names have their own bits. All others
/// share one bit, and are compared by name.
#[derive(Debug, Default)]
pub(crate) struct ModelNames(Mutex<Vec<String>>);

/// The name of a model in a request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ModelName<'a> {
    name: &'a str,
    /// Zero if no instance has listed it.
    bit: u64,
}

/// The bit shared by all names without their own.
const OTHERS: u64 = 1 << OWN_BITS;
/// The number of names with their own bit.
const OWN_BITS: usize = 63;

impl ModelNames {
    /// Looks up the bit of a name.
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

/// The models that one instance has listed.
#[derive(Debug, Default)]
pub(crate) struct Models {
    /// Zero until the instance has listed its models.
    bits: AtomicU64,
    /// The bits of those that are adapters of another model.
    adapters: AtomicU64,
    cards: Mutex<Arc<BTreeMap<String, Value>>>,
}

impl Models {
    /// Returns the bits of the models that the instance may serve: all bits until it has listed
    /// any.
    pub(super) fn bits(&self) -> u64 {
        match self.bits.load(Relaxed) {
            0 => u64::MAX,
            bits => bits,
        }
    }

    /// Returns true if the instance may serve this model.
    pub(crate) fn serve(&self, model: ModelName<'_>) -> bool {
        let bits = self.bits.load(Relaxed);
        let alone = || model.bit != OTHERS || self.cards().contains_key(model.name);
        bits == 0 || (bits & model.bit != 0 && alone())
    }

    /// Returns true if the instance has listed this model as an adapter of another one.
    pub(crate) fn has_adapter(&self, model: ModelName<'_>) -> bool {
        self.adapters.load(Relaxed) & model.bit != 0
            && (model.bit != OTHERS || self.cards().get(model.name).is_some_and(is_adapter))
    }

    /// Returns true if there is a model that both may serve.
    pub(super) fn share_one(&self, other: &Models) -> bool {
        let (ours, theirs) = (self.bits.load(Relaxed), other.bits.load(Relaxed));
        if ours == 0 || theirs == 0 || owned(ours & theirs) {
            return true;
        }
        let theirs_too =
            |theirs: &BTreeMap<_, _>| self.cards().keys().any(|name| theirs.contains_key(name));
        ours & theirs != 0 && theirs_too(&other.cards())
    }

    /// Returns the cards of `/v1/models` by id; empty until the instance has listed any.
    pub(crate) fn cards(&self) -> Arc<BTreeMap<String, Value>> {
        Arc::clone(&self.cards.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Stores an answer to `GET /v1/models`. Ignores an answer that is not a list of models.
    pub(crate) fn learn(&self, answer: &Value, names: &ModelNames) {
        let list =
            answer.get("data").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
        let id = |card: &Value| card.get("id").and_then(Value::as_str).map(str::to_owned);
        let cards: BTreeMap<String, Value> =
            list.iter().take(4096).filter_map(|card| Some((id(card)?, card.clone()))).collect();
        if cards.is_empty() {
            return;
        }
        let (mut bits, mut adapters) = (0, 0);
        for (name, card) in &cards {
            let bit = names.learn(name);
            bits |= bit;
            adapters |= if is_adapter(card) { bit } else { 0 };
        }
        *self.cards.lock().unwrap_or_else(PoisonError::into_inner) = Arc::new(cards);
        self.bits.store(bits, Relaxed);
        self.adapters.store(adapters, Relaxed);
    }
}

fn is_adapter(card: &Value) -> bool {
    card.get("parent").is_some_and(|parent| !parent.is_null())
}

/// Returns true if one of these bits belongs to a single name.
pub(super) fn owned(bits: u64) -> bool {
    bits & !OTHERS != 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_instance_serves_any_model_until_it_lists_its_own() {
        let (names, models) = (ModelNames::default(), Models::default());
        assert!(models.serve(names.named("a")));
        models.learn(&serde_json::json!({"data": [{"id": "a"}, {"id": "b"}]}), &names);
        assert!(models.serve(names.named("a")) && models.serve(names.named("b")));
        assert!(!models.serve(names.named("c")));
        models.learn(&serde_json::json!({"error": "no"}), &names);
        assert_eq!(models.cards().len(), 2, "an error changes nothing");
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
    fn names_that_share_a_bit_are_distinguished() {
        let names = ModelNames::default();
        let few = of(&names, ["first".to_owned()]);
        let many = of(&names, loras(0..100));
        assert!(many.serve(names.named("lora-0")) && many.serve(names.named("lora-99")));
        assert!(!few.serve(names.named("lora-99")) && !many.serve(names.named("first")));
        assert!(
            !many.serve(names.named("lora-100")),
            "it shares their bit, but is a different name"
        );
        let later = of(&names, loras(100..200));
        assert!(later.serve(names.named("lora-100")) && !later.serve(names.named("lora-99")));
        assert!(!many.share_one(&later) && !later.share_one(&many));
        assert!(many.share_one(&of(&names, loras(99..101))) && !many.share_one(&few));
    }

    #[test]
    fn adapters_are_those_with_a_parent() {
        let (names, models) = (ModelNames::default(), Models::default());
        let card = |id: &str, parent: Option<&str>| serde_json::json!({"id": id, "parent": parent});
        let mut cards: Vec<_> = loras(0..100).map(|lora| card(&lora, Some("base"))).collect();
        cards.extend([card("base", None), card("z", None)]);
        models.learn(&serde_json::json!({ "data": cards }), &names);
        let has_adapter = |name: &str| models.has_adapter(names.named(name));
        assert!(has_adapter("lora-0") && has_adapter("lora-99"));
        assert!(!has_adapter("base") && !has_adapter("z") && !has_adapter("lora-100"));
        models.learn(&serde_json::json!({"data": [card("lora-0", None)]}), &names);
        assert!(!models.has_adapter(names.named("lora-0")), "it is another model now");
    }

    #[test]
    fn an_instance_with_a_model_for_each_bit_does_not_serve_every_model() {
        let names = ModelNames::default();
        let all = of(&names, loras(0..64));
        assert!(!all.serve(names.named("another")));
        assert!(!all.share_one(&of(&names, ["another".to_owned()])));
        assert!(all.share_one(&Models::default()), "an instance without a list may serve it");
    }
}
